#!/usr/bin/env python3
"""The C++ blocks of pages in docs/ are text of tests and programs, which compile and run them.

Blanks, line ends and comments do not count, "…" and an empty line stand for any text, and an #include
stands somewhere in the file that has the rest of its block. A block with a file's name ("```cpp gan.cc")
is the whole of that file.
"""

import os
import re
import sys
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import source_tree  # noqa: E402
import xml_unittest  # noqa: E402

BLOCKS = "tests/readme_example/page_blocks_test.cc"
PROGRAMS = ("tests/readme_example/", "tools/examples/")
# The sources that have the blocks of a page, and how many blocks the page has.
PAGES = {
    "docs/checkpoint.md": (5, [BLOCKS]),
    "docs/comm_hooks.md": (1, [BLOCKS]),
    "docs/data.md": (4, ["ddp/data/random_data_test.cc", "tools/datasets/synthetic_test.cc"]),
    "docs/ddp.md": (2, [BLOCKS]),
    "docs/gather.md": (3, [BLOCKS]),
    "docs/logging.md": (1, ["ddp/trainer/trainer_test.cc"]),
    "docs/metrics.md": (3, [BLOCKS, "ddp/metrics/metrics_test.cc"]),
    "docs/options.md": (1, [BLOCKS]),
    "docs/own_loop.md": (2, ["ddp/trainer/loop_test.cc"]),
    "docs/training.md": (3, [BLOCKS]),
    "docs/training_callbacks.md": (1, [BLOCKS]),
    "docs/training_optimizers.md": (2, [BLOCKS]),
    "docs/zero.md": (2, [BLOCKS]),
}
# How many lines programs may have that are to be read at a glance.
MOST_LINES = {
    "tools/examples/gan.cc": 90,
    "tools/examples/own_loop.cc": 60,
    "tools/examples/start_resume.cc": 30,
    "tools/train.cc": 99,
}
# Blocks that nothing compiles: page, first line, and why.
EXCEPTIONS = {}
FENCE = re.compile(r"^```(?:c\+\+|cpp)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INCLUDE = re.compile(r"^#include .*$", re.MULTILINE)
COMMENT = re.compile(r"(?:^|(?<=\s))//.*$|/\*.*?\*/", re.MULTILINE)


def read(path):
    with open(os.path.join(source_tree.root(), path)) as f:
        return f.read()


def without_blanks(text):
    return re.sub(r"\s", "", COMMENT.sub("", text))


def has(source, block):
    """Whether a source has the text of a block."""
    includes = INCLUDE.findall(block)
    parts = re.split(r"…|\n\s*\n", COMMENT.sub("", INCLUDE.sub("", block)))
    pattern = re.compile(".*?".join(re.escape(without_blanks(part)) for part in parts))
    return set(includes) <= set(INCLUDE.findall(source)) and pattern.search(without_blanks(source)) is not None


def is_file(name, block):
    """Whether a program has this name, and the text of a block and no other."""
    paths = [folder + name for folder in PROGRAMS]
    texts = [read(path) for path in paths if os.path.exists(os.path.join(source_tree.root(), path))]
    return without_blanks(block) in map(without_blanks, texts)


class PagesTest(unittest.TestCase):
    def test_blocks_are_text_of_tests(self):
        unused = set(EXCEPTIONS)
        for page, (count, paths) in PAGES.items():
            blocks = FENCE.findall(read(page))
            self.assertEqual(len(blocks), count, page)
            sources = [read(path) for path in paths]
            for name, block in blocks:
                key = (page, block.splitlines()[0])
                if key in EXCEPTIONS:
                    unused.discard(key)
                    continue
                with self.subTest(page=page):
                    if name:
                        self.assertTrue(is_file(name, block), "%s: %s is another" % (page, name))
                    else:
                        self.assertTrue(
                            any(has(source, block) for source in sources),
                            "%s: none of %s has:\n%s" % (page, paths, block),
                        )
        self.assertEqual(unused, set(), "exceptions that no page has")

    def test_programs_are_short(self):
        for path, most in MOST_LINES.items():
            self.assertLessEqual(read(path).count("\n"), most, path)

    def test_other_text_is_noticed(self):
        source = '#include "a.h"\nint F() {\n  return 1 +\n      2;  // three\n}\nint G();\nint H();\n'
        self.assertTrue(has(source, '#include "a.h"\nint F() { return 1 + 2; }\n'))
        self.assertTrue(has(source, "int F() { … }\n"))
        self.assertTrue(has(source, "int F() {  // of nothing\n  return 1 + /* and */ 2; }\n"))
        self.assertTrue(has(source, "return 1 + 2;\n\nint H();\n"))
        self.assertFalse(has(source, "return 1 + 2;\nint H();\n"))
        self.assertFalse(has(source, "int H();\n\nint G();\n"))
        self.assertFalse(has(source, "int F() { return 1 + 3; }\n"))
        self.assertFalse(has(source, '#include "b.h"\nint F() { … }\n'))
        self.assertFalse(is_file("my_model.cc", "int main() {}\n"))
        self.assertFalse(is_file("none.cc", "int main() {}\n"))


if __name__ == "__main__":
    xml_unittest.main()
