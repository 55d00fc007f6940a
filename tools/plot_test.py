#!/usr/bin/env python3
"""//tools:plot on folders as runs and sweeps leave them."""

import html.parser
import json
import os
import re
import sys

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import program_case  # noqa: E402
import xml_unittest  # noqa: E402

VOID = {"meta", "input", "br", "link", "img", "hr"}


def lines(*records):
    return "".join(json.dumps(record) + "\n" for record in records)


FIRST = lines(
    {"step": 0, "time": 1.5, "hyper_parameters": "| name | value |\n| --- | --- |\n| lr | 9 |\n"},
    {"step": 10, "time": 2.5, "train/loss": 0.5, "train/lr": 0.1},
    {"step": 20, "time": 3.5, "train/loss": 0.25, "train/lr": 0.05},
    {"step": 20, "time": 3.5, "test/accuracy": 0.75, "test/loss": 0.5},
    {"step": 30, "time": 4.5, "train/loss": 0.375, "train/lr": 0.025},
    {"step": 30, "time": 4.5, "test/accuracy": 0.5, "test/loss": 1.25e-7},
    {"step": 30, "time": 4.5, "event": "run_end", "reason": "end", "saved": ""},
)
SECOND = lines(
    {"step": 10, "time": 2.5, "train/loss": "NaN", "train/lr": 0.1},
    {"step": 20, "time": 3.5, "train/loss": 0.125, "train/lr": 0.1},
    {"step": 20, "time": 3.5, "test/accuracy": 0.875, "test/loss": "Infinity"},
)
CONFIG = "log:\n  dir: runs/%s\noptimizer:\n  lr: %s\n  name: sgd\nmilestones: [3, %d]\n"


class Page(html.parser.HTMLParser):
    """The elements of a page; fails for one that is closed and not open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts, self.links = [], {}, []
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attributes):
        self.links += [v for k, v in attributes if k in ("src", "href")]
        if tag not in VOID:
            self.open.append((tag, dict(attributes).get("id")))

    def handle_endtag(self, tag):
        opened, _ = self.open.pop()
        assert opened == tag, (opened, tag)

    def handle_data(self, data):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + data


class PlotTest(program_case.ProgramCase):
    PROGRAM = "tools/plot"
    maxDiff = None

    def plot(self, *arguments):
        done = self.run_program(*arguments)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done)
        return done.stdout

    def fails(self, code, pattern, *arguments):
        done = self.run_program(*arguments)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done)
        self.assertRegex(done.stderr, r"\Aerror: [^\n]*%s[^\n]*\n\Z" % pattern)

    def two_runs(self):
        self.write("runs/a/metrics.jsonl", FIRST)
        self.write("runs/a/config.yaml", CONFIG % ("a", "0.1", 6))
        self.write("runs/b/metrics.jsonl", SECOND)
        self.write("runs/b/config.yaml", CONFIG % ("b", "0.2", 6))

    def test_one_run(self):
        self.two_runs()
        self.assertEqual(
            self.plot("runs/a/"),
            "tag            last      at step  best      at step\n"
            "test/accuracy  0.5       30       0.75      20\n"
            "test/loss      1.25e-07  30       1.25e-07  30\n"
            "train/loss     0.375     30       0.25      20\n"
            "train/lr       0.025     30       -         -\n",
        )

    def test_runs_beside_each_other(self):
        self.two_runs()
        expected = (
            "tag            run  last      diff    best      at step  diff\n"
            "test/accuracy  a    0.5               0.75      20\n"
            "               b    0.875     +0.375  0.875     20       +0.125\n"
            "test/loss      a    1.25e-07          1.25e-07  30\n"
            "               b    Infinity  -       -         -\n"
            "train/loss     a    0.375             0.25      20\n"
            "               b    0.125     -0.25   0.125     20       -0.125\n"
            "train/lr       a    0.025             -         -\n"
            "               b    0.1       +0.075  -         -\n"
            "\n"
            "run  optimizer.lr\n"
            "a    0.1\n"
            "b    0.2\n"
        )
        self.assertEqual(self.plot("runs/a", "runs/b"), expected)
        # The folder of a sweep has its jobs; what is no run is passed over, and so is a second mention.
        self.write("runs/sweep.jsonl", "{}\n")
        self.write("runs/queued/config.yaml", "")
        self.assertEqual(self.plot("runs"), expected)
        self.assertEqual(self.plot("runs/a", "runs", "runs/b/"), expected)

    def test_best_and_tags(self):
        self.two_runs()
        self.assertEqual(
            self.plot("runs/a", "--tags=l[or]", "--best=train/lr:max,train/loss:max"),
            "tag         last      at step  best      at step\n"
            "test/loss   1.25e-07  30       1.25e-07  30\n"
            "train/loss  0.375     30       0.5       10\n"
            "train/lr    0.025     30       0.1       10\n",
        )
        self.fails(2, "--best=x:most", "runs/a", "--best=x:most")
        self.fails(2, "--best=train/los:max has 'train/los', which is no tag of the runs; there are: test/",
                   "runs/a", "--best=train/los:max")  # fmt: skip
        self.fails(2, r"--tags=\[ is no regular expression", "runs/a", "--tags=[")
        self.fails(2, "--tags=nothing is found in no tag; there are: test/accuracy", "runs",
                   "--tags=nothing")  # fmt: skip

    def test_known_names(self):
        values = {"f1_macro": 1, "top5_acc": 1, "val/PERPLEXITY": 0, "lossy": None, "step_error": 0,
                  "accuracy/loss": 0, "loss/accuracy": 1}  # fmt: skip
        self.write("r/metrics.jsonl", lines({"step": 1, **dict.fromkeys(values, 0)},
                                            {"step": 2, **dict.fromkeys(values, 1)}))  # fmt: skip
        tags = json.loads(self.plot("r", "--json"))["runs"][0]["tags"]
        self.assertEqual({tag: of["best"] for tag, of in tags.items()}, values)

    def test_json(self):
        self.two_runs()
        report = json.loads(self.plot("runs/a", "runs/b", "--json", "--tags=train/loss"))
        self.assertEqual(report["differing_options"], ["optimizer.lr"])
        a, b = report["runs"]
        self.assertEqual((a["name"], a["folder"]), ("a", "runs/a"))
        self.assertEqual(a["options"], {"milestones": "[3, 6]", "optimizer.lr": "0.1",
                                        "optimizer.name": "sgd"})  # fmt: skip
        self.assertEqual(b["tags"], {"train/loss": {
            "last": 0.125, "last_step": 20, "best": 0.125, "best_step": 20, "points": 2,
            "not_finite": 1}})  # fmt: skip

    def test_options_without_configuration_and_of_the_last_start(self):
        self.write("r/a/metrics.jsonl", FIRST)
        self.write("r/b/metrics.jsonl", FIRST.replace("| lr | 9 |", "| lr | a\\\\|b |"))
        self.assertTrue(self.plot("r").endswith("\nrun  lr\na    9\nb    a|b\n"))
        self.write("r/a/config.yaml", "lr: 1\n")
        self.write("r/a/config_step_9.yaml", "lr: 2\n")
        self.write("r/a/config_step_10.yaml", "lr: 3\n")
        self.assertTrue(self.plot("r").endswith("\nrun  lr\na    3\nb    a|b\n"))
        self.write("r/a/config.yaml", "lr: [\n")
        os.remove(os.path.join(self.folder, "r/a/config_step_9.yaml"))
        os.remove(os.path.join(self.folder, "r/a/config_step_10.yaml"))
        done = self.run_program("r")
        self.assertEqual(done.stderr,
                         "warning: r/a/config.yaml: not YAML; its options are left out\n")  # fmt: skip
        self.assertEqual(done.returncode, 0)

    def test_later_lines_count(self):
        self.write("r/metrics.jsonl", lines(
            {"step": 1, "loss": 4, "x": 0}, {"step": 2, "loss": 0}, {"step": 3, "loss": 0},
            {"step": 2, "loss": 2}, {"step": 2, "loss": 3}) + '{"step":3,"loss":0.')  # fmt: skip
        self.assertEqual(self.plot("r", "--tags=loss"), "tag   last  at step  best  at step\n"
                                                        "loss  3     2        3     2\n")  # fmt: skip
        self.write("r/metrics.jsonl", '{"step":1,"loss":1}\nnoise\n[1]\n{"loss":0}\n{"step":2,"loss":2}')
        done = self.run_program("r")
        self.assertEqual(done.stderr, "warning: r/metrics.jsonl:2: not a record with a step; left out 3 lines\n")
        self.assertIn("loss  2     2        1     1\n", done.stdout)

    def test_folders_without_values(self):
        self.fails(1, "none: No such file or directory; give the folder of a run", "none")
        self.fails(2, "give one or more folders")
        self.write("empty/metrics.jsonl", "")
        self.fails(1, "empty: no values in metrics.jsonl yet", "empty")
        self.write("noise/metrics.jsonl", "noise\n")
        self.fails(1, r"noise: no values in metrics.jsonl \(noise/metrics.jsonl:1: not a record", "noise")
        self.write("other/file", "")
        self.fails(1, r"other has no metrics.jsonl, nor has a folder in it", "other")
        self.write("r/metrics.jsonl", FIRST)
        done = self.run_program("r", "empty")
        self.assertEqual(done.stderr, "warning: empty/metrics.jsonl: no values yet; left out\n")
        self.assertEqual(done.returncode, 0)
        self.fails(1, "--html=/nowhere/x.html cannot be written: ", "r", "--html=/nowhere/x.html")

    def left_out(self, *patterns, shown, code=1):
        """Plots `shown`; a line on standard error for each pattern. Returns the rest, what is shown."""
        done = self.run_program(*shown)
        self.assertEqual(done.returncode, code, done)
        said = done.stderr.splitlines()
        self.assertEqual(len(said), len(patterns), said)
        for line, pattern in zip(said, patterns):
            self.assertRegex(line, r"\A%s" % pattern)
        return done.stdout

    def test_what_cannot_be_read_does_not_hide_the_rest(self):
        self.two_runs()
        both = self.plot("runs/a", "runs/b")
        none = "error: listing folder none: No such file or directory; give the folder of a run"
        self.assertEqual(self.left_out(none, shown=["runs/a", "none", "runs/b"]), both)
        # With no permission, reading fails, too; but not for root.
        os.makedirs(os.path.join(self.folder, "bad/metrics.jsonl"))
        bad = "error: reading bad/metrics.jsonl: Is a directory"
        self.assertEqual(self.left_out(bad, none, shown=["bad", "runs", "none"]), both)
        self.write("other/file", "")
        self.assertEqual(self.left_out("error: other has no metrics.jsonl, nor has", shown=["runs", "other"]), both)
        self.assertEqual(self.left_out(bad, none, shown=["bad/", "none"]), "")
        # In the folder of a sweep, where nobody has named it.
        os.rename(os.path.join(self.folder, "bad"), os.path.join(self.folder, "runs/bad"))
        os.symlink("loop", os.path.join(self.folder, "runs/loop"))
        self.assertEqual(self.left_out("error: looking for runs/loop/metrics.jsonl: Too many levels",
                                       "error: reading runs/bad/metrics.jsonl: ", shown=["runs"]), both)  # fmt: skip
        report = self.run_program("runs", "--json")
        self.assertEqual([run["name"] for run in json.loads(report.stdout)["runs"]], ["a", "b"])
        self.assertEqual(report.returncode, 1)

    def test_a_damaged_end_and_runs_without_metrics_yet(self):
        self.two_runs()
        both = self.plot("runs")
        self.write("runs/b/metrics.jsonl", SECOND + "\0" * 9)
        self.assertEqual(self.plot("runs"), both)
        self.write("runs/b/metrics.jsonl", SECOND + '{"step":30,"train/lo\n')
        self.assertEqual(self.left_out(r"warning: runs/b/metrics.jsonl:4: not a record", shown=["runs"], code=0), both)
        self.write("queued/config.yaml", "")
        self.write("sweep/sweep.jsonl", "{}\n")
        self.write("sweep/lr=1/config.yaml", "")
        self.write("runs/b/metrics.jsonl", SECOND)
        self.assertEqual(self.left_out("warning: queued: no metrics.jsonl yet; left out",
                                       "warning: sweep: no metrics.jsonl yet; left out",
                                       shown=["queued/", "runs", "sweep"], code=0), both)  # fmt: skip
        self.fails(1, "queued, sweep: no values in metrics.jsonl yet", "queued", "sweep")

    def test_a_configuration_that_cannot_be_read(self):
        self.two_runs()
        os.makedirs(os.path.join(self.folder, "runs/b/config_step_9.yaml"))
        self.left_out("warning: reading runs/b/config_step_9.yaml: Is a directory; its options are left out",
                      shown=["runs"], code=0)  # fmt: skip

    def page(self, *arguments):
        self.plot(*arguments, "--html=page.html")
        with open(os.path.join(self.folder, "page.html")) as f:
            text = f.read()
        page = Page(text)
        self.assertEqual(page.links, [])
        # Of SVG's name space only.
        self.assertEqual(set(re.findall(r"https?://[^\s\"'<>]+", text)), {"http://www.w3.org/2000/svg"})
        return json.loads(page.texts[("script", "curves")])

    def test_page_has_every_curve(self):
        self.two_runs()
        curves = self.page("runs/a", "runs/b")
        self.assertEqual([run["name"] for run in curves["runs"]], ["a", "b"])
        self.assertEqual(curves["differing_options"], ["optimizer.lr"])
        found = {(tag["tag"], curve["run"]): list(zip(curve["steps"], curve["values"]))
                 for tag in curves["tags"] for curve in tag["curves"]}  # fmt: skip
        self.assertEqual(found, {
            ("test/accuracy", 0): [(20, 0.75), (30, 0.5)],
            ("test/accuracy", 1): [(20, 0.875)],
            ("test/loss", 0): [(20, 0.5), (30, 1.25e-7)],
            ("test/loss", 1): [(20, None)],
            ("train/loss", 0): [(10, 0.5), (20, 0.25), (30, 0.375)],
            ("train/loss", 1): [(10, None), (20, 0.125)],
            ("train/lr", 0): [(10, 0.1), (20, 0.05), (30, 0.025)],
            ("train/lr", 1): [(10, 0.1), (20, 0.1)],
        })  # fmt: skip

    def test_page_with_hostile_names(self):
        name = "</script><script>alert(1)</script>&amp;\u2028"
        self.write("r/metrics.jsonl", lines({"step": 1, name: 1}))
        self.assertEqual(self.page("r")["tags"][0]["tag"], name)
        self.write("r/metrics.jsonl", lines({"step": 1, "a\nb\x1b[31m": 1}))
        self.assertIn("\na?b?[31m  1", self.plot("r"))

    def test_many_runs_and_points(self):
        for run in range(100):
            self.write("sweep/seed=%d/metrics.jsonl" % run,
                       lines(*({"step": s, "loss": run + s / 1000} for s in range(100))))  # fmt: skip
        self.assertEqual(len(self.plot("sweep").splitlines()), 101)
        self.assertEqual(len(self.page("sweep")["tags"][0]["curves"]), 100)
        values = [float(i % 7) for i in range(100001)]
        values[50000], values[60000], values[70000] = -5.0, 99.0, float("nan")
        self.write("r/metrics.jsonl", lines(
            *({"step": i, "x": v if v == v else "NaN"} for i, v in enumerate(values))))  # fmt: skip
        (tag,) = self.page("r")["tags"]
        (curve,) = tag["curves"]
        self.assertTrue(tag["thinned"])
        self.assertLessEqual(len(curve["steps"]), 3000)
        self.assertEqual(curve["steps"], sorted(set(curve["steps"])))
        points = dict(zip(curve["steps"], curve["values"]))
        self.assertEqual((points[50000], points[60000], points[70000]), (-5, 99, None))


if __name__ == "__main__":
    xml_unittest.main()
