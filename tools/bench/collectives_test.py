#!/usr/bin/env python3
"""Tests //tools/bench:collectives, from flags to files, with real ranks over gloo, and its bars."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as ElementTree

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")
sys.path.insert(0, RUNFILES + "/tools/bench")

import collectives_bars  # noqa: E402
import collectives_plot  # noqa: E402
import runfiles  # noqa: E402
import xml_unittest  # noqa: E402

BENCH = os.path.join(RUNFILES, "tools/bench")
SVG = "{http://www.w3.org/2000/svg}"


def run(*arguments, peers="none"):
    command = [os.path.join(BENCH, "collectives.py"), "--peers=" + peers, "--rounds=2"]
    command += ["--burst_ms=0.5", *arguments]
    # Open MPI names its shared memory by process ids, which are the same in two sandboxes with one
    # /dev/shm; below its other folder lie sockets, whose paths must be short.
    with tempfile.TemporaryDirectory(prefix="ddp_mpi.", dir="/tmp") as folder:
        environment = dict(
            os.environ,
            OMPI_MCA_btl_vader_backing_directory=folder,
            OMPI_MCA_orte_tmpdir_base=folder,
        )
        return subprocess.run(command, capture_output=True, text=True, env=environment)


class SmokeTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.json = os.path.join(scratch.name, "out.json")
        self.svg = os.path.join(scratch.name, "out.svg")

    def results(self):
        with open(self.json) as f:
            return [json.loads(line) for line in f]

    def test_each_result_is_a_line_and_a_point(self):
        done = run(
            "--op=allreduce,reduce_scatter,allgather,broadcast", "--sizes=4,64K",
            "--through=process_group,backend", "--json=" + self.json, "--plot=" + self.svg,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        results = self.results()
        keys = {(r["op"], r["bytes"], r["through"]) for r in results}
        self.assertEqual(len(results), 16)
        self.assertEqual(len(keys), 16)
        self.assertIn(("allreduce", 4, "process_group"), keys)
        # One element for each rank is the least that can be shared out.
        self.assertIn(("allgather", 8, "backend"), keys)
        for r in results:
            self.assertEqual((r["backend"], r["world_size"]), ("gloo", 2))
            self.assertLess(0, r["us_min"])
            self.assertLessEqual(r["us_min"], r["us_median"])
            self.assertAlmostEqual(
                r["gb_per_s"], r["bytes"] / r["us_median"] / 1e3, delta=1e-3 * r["gb_per_s"]
            )
        # A legend's dot for each line of each panel's row, and in either panel one for each result.
        dots = ElementTree.parse(self.svg).getroot().findall(SVG + "circle")
        self.assertEqual(len(dots), 2 * 16 + 4 * 2)
        replayed = run("--replay=" + self.json, "--json=-")
        self.assertEqual([json.loads(line) for line in replayed.stdout.splitlines()], results)

    def test_sizes_of_further_types_have_as_many_elements(self):
        done = run("--sizes=1K", "--dtype=float32,float64", "--world_sizes=3", "--json=" + self.json)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual([r["bytes"] for r in self.results()], [1024, 2048])
        self.assertEqual([r["elements"] for r in self.results()], [256, 256])

    def test_a_wrong_result_is_seen_before_anything_is_timed(self):
        for op in ("allreduce", "reduce_scatter", "allgather", "broadcast"):
            done = run("--op=" + op, "--sizes=64K", "--wrong_reference", "--json=" + self.json)
            self.assertEqual(done.returncode, 1, done.stdout)
            self.assertIn("wrong result", done.stderr)
            self.assertFalse(os.path.exists(self.json))

    def test_open_mpi_runs_beside_ours(self):
        done = run("--sizes=1K", "--json=" + self.json, peers="openmpi")
        if "error: --peers=openmpi:" in done.stderr:
            self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ours, peer = self.results()
        self.assertEqual((ours["backend"], peer["backend"]), ("gloo", "openmpi"))
        self.assertGreater(ours["ratio"]["openmpi"], 0)
        self.assertRegex(done.stdout, "mpirun --bind-to (none|core)")

    def test_backend_mpi_is_measured_under_mpirun(self):
        done = run("--backends=gloo,mpi", "--sizes=1K", "--json=" + self.json)
        if "mpi is none of" in done.stderr:
            self.skipTest(done.stderr.strip())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual({r["backend"] for r in self.results()}, {"gloo", "mpi"})

    def test_every_way_into_shm_gives_right_results(self):
        done = run(
            "--backends=shm", "--op=allreduce,reduce_scatter,allgather,broadcast",
            "--sizes=4,16K,256K", "--through=process_group,backend,raw", "--arena=0,1",
            "--dtype=float32,bfloat16", "--world_sizes=3", "--json=" + self.json,
        )  # fmt: skip
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        ways = {(r["through"], r["arena"]) for r in self.results()}
        self.assertEqual(len(ways), 5, ways)  # raw has no arena
        self.assertEqual(len(self.results()), 5 * 4 * 3 * 2)

    def test_what_is_not_there_is_an_error_that_says_what_is(self):
        for arguments, said in (
            (["--backends=gloo,glue"], "backend=glue is none of auto, gloo"),
            (["--through=raw"], "gloo has no through=raw, only process_group,backend"),
            (["--arena"], "gloo has no arena=1, only 0"),
            (["--sizes=4X"], "no size"),
            (["--op=allredoce"], "none of allreduce"),
            (["--world_sizes=1"], "not a number of ranks"),
        ):
            done = run("--sizes=4", *arguments)
            self.assertNotEqual(done.returncode, 0, arguments)
            self.assertIn(said, done.stderr)
            self.assertNotIn("Traceback", done.stderr)


class ByPathTest(unittest.TestCase):
    """As bazel-bin/tools/bench/collectives, without anything that `bazel run` sets."""

    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.scratch = scratch.name
        # bazel-bin has a link to the source, and a folder of runfiles beside it.
        self.program = os.path.join(self.scratch, "bin", "collectives")
        os.makedirs(os.path.dirname(self.program))
        os.symlink(os.path.realpath(os.path.join(BENCH, "collectives.py")), self.program)
        os.symlink(os.environ["TEST_SRCDIR"], self.program + ".runfiles")
        self.link = os.path.join(self.scratch, "link")
        os.symlink("bin/collectives", self.link)

    def start(self, program, cwd, *arguments):
        return subprocess.run(
            [program, "--peers=none", "--sizes=4", "--rounds=1", "--json=-", *arguments],
            cwd=cwd, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True,
        )  # fmt: skip

    def test_from_any_folder_and_through_links(self):
        for program, cwd in (
            (self.program, "/"),
            ("bin/collectives", self.scratch),
            (self.link, "/"),
            ("./link", self.scratch),
        ):
            with self.subTest(program=program):
                done = self.start(program, cwd)
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertEqual(json.loads(done.stdout)["bytes"], 4)

    def test_without_runfiles_it_says_what_to_do(self):
        os.unlink(self.program + ".runfiles")
        done = self.start(self.program, "/")
        self.assertEqual(done.returncode, 1)
        self.assertIn("bazel run //tools/bench:collectives", done.stderr)
        self.assertNotIn("Traceback", done.stderr)

    def test_files_are_found_in_a_manifest_too(self):
        target = os.path.join(self.scratch, "x y")
        with open(target, "w"):
            pass
        for path in (self.program + ".runfiles_manifest", os.path.join(self.scratch, "elsewhere")):
            with open(path, "w") as f:
                f.write("a/b /nowhere\nws/x %s\n" % target)
            environment = {"RUNFILES_MANIFEST_FILE": path} if "elsewhere" in path else {}
            self.assertEqual(runfiles.find("ws/x", self.program, environment), target)
            self.assertIsNone(runfiles.find("a/b", self.program, environment))
            os.unlink(path)
        self.assertIsNone(runfiles.find("ws/x", self.program, {}))

    def test_repositories_of_modules_have_other_names(self):
        root = os.path.join(self.scratch, "mapped.runfiles")
        os.makedirs(os.path.join(root, "_main~data"))
        found = os.path.join(root, "_main~data", "x")
        with open(found, "w"):
            pass
        mapping = os.path.join(root, "_repo_mapping")
        with open(mapping, "w") as f:
            f.write(",data,_main~data\n,ws,_main\nother,data,other~data\n")
        script = os.path.join(self.scratch, "mapped")
        self.assertEqual(runfiles.find("data/x", script, {}), found)
        self.assertIsNone(runfiles.find("ws/x", script, {}))
        manifest = os.path.join(self.scratch, "list")
        with open(manifest, "w") as f:
            f.write("_main~data/x %s\n_repo_mapping %s\n" % (found, mapping))
        environment = {"RUNFILES_MANIFEST_FILE": manifest}
        self.assertEqual(runfiles.find("data/x", "/nowhere", environment), found)

    def test_a_script_that_is_data_of_another_program(self):
        root = os.path.join(self.scratch, "other.runfiles")
        os.makedirs(os.path.join(root, "ws"))
        for name in ("script", "data"):
            with open(os.path.join(root, "ws", name), "w"):
                pass
        found = runfiles.find("ws/data", os.path.join(root, "ws", "script"), {})
        self.assertEqual(found, os.path.join(root, "ws", "data"))


def result(us, size=1 << 20, **more):
    row = {
        "backend": "shm", "op": "allreduce", "world_size": 2, "bytes": size, "elements": size // 4,
        "us_median": us, "gb_per_s": size / us / 1e3, "dtype": "float32",
        "through": "process_group", "arena": False, "variant": "",
    }  # fmt: skip
    return dict(row, **more)


def open_mpi(us, **more):
    return result(us, backend="openmpi", through="raw", variant="in_place", **more)


class BarsTest(unittest.TestCase):
    def check(self, *results):
        said = []
        return collectives_bars.check(results, said.append), "\n".join(said)

    def test_met_and_missed(self):
        met, said = self.check(result(89), open_mpi(100))
        self.assertTrue(met, said)
        met, said = self.check(result(91), open_mpi(100))
        self.assertFalse(met)
        self.assertRegex(said, r"shm / Open MPI +allreduce +2 +1048576 +0.91 +0.9")

    def test_of_four_ranks_less_is_asked(self):
        met, said = self.check(result(99, world_size=4), open_mpi(100, world_size=4))
        self.assertTrue(met, said)

    def test_microseconds(self):
        self.assertTrue(self.check(result(9.9, size=1024))[0])
        self.assertFalse(self.check(result(10.1, size=1024))[0])

    def test_types_are_compared_at_as_many_elements(self):
        half = result(60, size=1 << 19, elements=1 << 18, dtype="bfloat16")
        self.assertTrue(self.check(half, result(61))[0])
        self.assertFalse(self.check(half, result(59))[0])

    def test_nothing_measured_is_not_a_pass(self):
        met, said = self.check(open_mpi(100))
        self.assertFalse(met)
        self.assertIn("not measured: shm / gloo, allreduce, 2 ranks", said)

    def test_every_bar_can_be_missed(self):
        for bar in collectives_bars.BARS:
            size = max(bar.low, 4)
            ours = dict(result(1000, size=size, world_size=bar.world_sizes[0]), **bar.ours)
            rows = [ours] + ([dict(ours, us_median=1, **bar.other)] if bar.other else [])
            judged, silent = collectives_bars.judge(rows, [bar])
            self.assertEqual(silent, [], bar)
            self.assertGreater(judged[0][2], bar.limit, bar)


class PlotTest(unittest.TestCase):
    def test_variants_of_a_peer_are_one_line_and_names_are_escaped(self):
        rows = [open_mpi(100), open_mpi(400, size=4 << 20), result(90, backend="<shm>")]
        rows[0]["variant"] = "separate"
        root = ElementTree.fromstring(collectives_plot.svg(rows))
        texts = [text.text for text in root.findall(SVG + "text")]
        self.assertEqual(texts.count("openmpi"), 1)
        self.assertEqual(texts.count("<shm> process_group"), 1)

    def test_nothing_is_no_picture(self):
        with self.assertRaises(ValueError):
            collectives_plot.svg([])


if __name__ == "__main__":
    xml_unittest.main()
