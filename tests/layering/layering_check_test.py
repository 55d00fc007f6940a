#!/usr/bin/env python3
"""The checker finds every violation planted in a small tree, and none in a clean one."""

import os
import sys
import tempfile
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path[:0] = [RUNFILES + "/tests/layering", RUNFILES + "/tests/support"]

import layering_check  # noqa: E402
import xml_unittest  # noqa: E402

HEADER = "#pragma once\n%s\nnamespace ddp {}\n"
CLEAN = {
    "base/status.h": HEADER % "",
    "launchers/rank.h": HEADER % '#include "base/status.h"',
    "launchers/local/local.h": HEADER % '#include "launchers/launcher.h"',
    "backends/gloo/gloo.cc": '#include "launchers/rank.h"\n#include <torch/torch.h>\n',
    "ddp/ddp_test.cc": '#include "backends/gloo/gloo.h"\n',
    "ddp/trainer/trainer.h": HEADER % '#include "checkpoint/format.h"\n#include "ddp/ddp.h"',
    "tools/train.cc": '#include "checkpoint/pt/pt.h"\n',
    "backends/hier/BUILD": 'cc_library(name = "hier", deps = ["//backends/gloo", "//backends/shm"])\n',
    "backends/BUILD": 'cc_library(name = "all", deps = ["//backends/gloo", "//backends/hier"])\n',
    "tools/BUILD": 'cc_binary(name = "train", deps = ["//checkpoint/pt"])\n',
    "third_party/x/deep.h": "// other people's, with guards of their own\n",
}


class LayeringCheckTest(unittest.TestCase):
    def check(self, files):
        with tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"]) as root:
            for path, text in files.items():
                os.makedirs(os.path.join(root, os.path.dirname(path)), exist_ok=True)
                with open(os.path.join(root, path), "w") as f:
                    f.write(text)
            return layering_check.check(root)[1]

    def assert_planted(self, path, text, *words):
        """`text` at `path` in an otherwise clean tree gives one problem, naming path and words."""
        found = self.check({**CLEAN, path: text})
        self.assertEqual(len(found), 1, found)
        for word in (path,) + words:
            self.assertIn(word, found[0])

    def test_clean_tree(self):
        self.assertEqual(self.check(CLEAN), [])

    def test_upward_include(self):
        self.assert_planted("base/bad.cc", '#include "launchers/rank.h"\n', "base must not use launchers")
        self.assert_planted("ddp/bad.cc", '#include "ddp/trainer/trainer.h"\n', "ddp must not use ddp/trainer")
        self.assert_planted("checkpoint/bad.cc", '#include "ddp/ddp.h"\n', "checkpoint must not use ddp")
        self.assert_planted("launchers/bad.cc", '# include <tools/flags.h>\n', "launchers must not use tools")

    def test_backends_take_only_the_rank(self):
        self.assert_planted("backends/bad.cc", '#include "launchers/launcher.h"\n', "must not use launchers")

    def test_upward_dependency(self):
        self.assert_planted("ddp/BUILD", 'cc_library(name = "x", deps = ["//tools:flags"])\n', ":x", "tools")
        self.assert_planted(
            "checkpoint/BUILD",
            'cc_library(name = "x", deps = select({"a": [], "b": ["//backends:backend"]}) + ["@z//:z"])\n',
            "checkpoint must not use backends",
        )

    def test_dependency_through_a_named_list(self):
        self.assert_planted("base/BUILD", 'D = ["//ddp"]\ncc_library(name = "x", deps = D)\n', "base must not use ddp")

    def test_torch_in_a_torch_free_layer(self):
        self.assert_planted("base/bad.h", HEADER % "#include <ATen/core/Tensor.h>", "free of torch")
        self.assert_planted("launchers/local/bad_test.cc", "#include <torch/torch.h>\n", "free of torch")
        self.assert_planted("base/BUILD", 'cc_test(name = "x_test", deps = ["@libtorch//:torch"])\n', "@libtorch")

    def test_implementation_named_outside_programs(self):
        self.assert_planted("ddp/trainer/bad.cc", '#include "checkpoint/pt/pt.h"\n', "checkpoint/pt")
        self.assert_planted("backends/BUILD", 'cc_library(name = "x", deps = ["//backends/gloo"])\n', "backends/gloo")
        self.assert_planted(
            "backends/nccl/bad.cc", '#include "backends/gloo/gloo.h"\n', "name an implementation"
        )

    def test_composed_implementation(self):
        """hier names its parts; nobody else names hier, nor hier anything else."""
        self.assert_planted("ddp/trainer/bad.cc", '#include "backends/hier/hier.h"\n', "backends/hier")
        self.assert_planted("backends/shm/bad.cc", '#include "backends/hier/hier.h"\n', "backends/hier")
        self.assert_planted("backends/hier/bad.cc", '#include "backends/mpi/mpi.h"\n', "backends/mpi")

    def test_traps(self):
        self.assert_planted(
            "ddp/bad.cc", "auto x = c10::dynamic_intrusive_pointer_cast<X>(y);\n", "where it fails")

    def test_loops_over_temporaries(self):
        for loop in ("for (const auto& x : Open(f(1), 2).List().value()) Use(x);",
                     "for (const Key& key : *Keys(folder)) {}",
                     "for (const auto& [name,\n size] : All().value()) {}"):  # fmt: skip
            self.assert_planted("base/bad.cc", loop, "ends before the loop begins")
        for loop in ("for (const auto& x : *keys) {}", "for (const auto& x : keys.value()) {}",
                     "for (const auto& x : Keys()) f(x.value());",
                     "for (int i = a ? f() : *g(); i < h().value(); ++i) {}"):  # fmt: skip
            self.assertEqual(self.check({**CLEAN, "base/good.cc": loop}), [])

    def test_header_rules(self):
        self.assert_planted("ddp/bad.h", "namespace ddp {}\n", "#pragma once")
        self.assert_planted("ddp/bad.h", "#pragma once\nnamespace other {}\n", "namespace ddp")

    def test_flags_in_messages_of_libraries(self):
        for text in (
            'E("add --lr");\n',
            'E("add "\n  "--lr=1");\n',
            'E(\'"\', "--lr");\n',
            'E(R"(x\n--lr)");\n',
            'E("--lr, as srun --nodes");\n',
        ):
            with self.subTest(text):
                self.assert_planted("launchers/bad.cc", text, "--lr", "without --")
                self.assertEqual(self.check({**CLEAN, "tools/main.cc": text, "ddp/x_test.cc": text}), [])
        for text in (
            '// "--lr"\n',
            'E("a -- b", "--", "a--b");\n',
            'E("start it with: srun "\n  "--nodes=N --ntasks-per-node=M");\n',
            'E("a CPU build (build with --config=cuda)");\n',
            "constexpr char kQuote = '\"';  // --lr\"\n",
        ):
            with self.subTest(text):
                self.assertEqual(self.check({**CLEAN, "launchers/good.cc": text}), [])

    def test_folders_whose_warnings_are_not_errors(self):
        flag = "build --per_file_copt=^(base|launchers|backends|checkpoint|ddp|tools|tests)/.*@-Wall,-Werror\n"
        self.assert_planted(".bazelrc", flag, "optim/")
        self.assertEqual(self.check({**CLEAN, ".bazelrc": flag.replace("ddp", "ddp|optim")}), [])

    def test_long_file(self):
        self.assert_planted("tools/long.py", "x = 1\n" * 901, "901 lines")
        self.assertEqual(self.check({**CLEAN, "tools/long.py": "x = 1\n" * 900}), [])


if __name__ == "__main__":
    xml_unittest.main()
