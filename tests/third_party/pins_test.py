#!/usr/bin/env python3
"""Each folder of third_party has complete pins, which ddp_dependencies() and the README list."""

import os
import re
import sys
import types
import unittest

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import source_tree  # noqa: E402
import xml_unittest  # noqa: E402

ROOT = os.path.join(source_tree.root(), "third_party")
FIELDS = {"folder", "version", "kind", "what", "sha256", "licence", "why"}
KINDS = {"pypi", "debian-source", "pypi-requirements", "system"}
SHA256 = re.compile(r"[0-9a-f]{64}")


def read(*path):
    with open(os.path.join(ROOT, *path)) as f:
        return f.read()


def folders():
    return sorted(n for n in os.listdir(ROOT) if os.path.isfile(os.path.join(ROOT, n, "BUILD")))


def pins(folder):
    """The structs of one pin.bzl by name; that much of Starlark is Python."""
    scope = {}
    exec(read(folder, "pin.bzl"), {"struct": types.SimpleNamespace}, scope)
    return {name: pin for name, pin in scope.items() if name.isupper()}


class PinsTest(unittest.TestCase):
    def test_every_folder_has_a_pin_and_deps_bzl_loads_it(self):
        deps = read("deps.bzl")
        self.assertGreater(len(folders()), 10)
        for folder in folders():
            with self.subTest(folder=folder):
                self.assertTrue(pins(folder))
                self.assertIn('load("//third_party/%s:' % folder, deps)

    def test_every_pin_is_complete(self):
        for folder in folders():
            for name, pin in pins(folder).items():
                with self.subTest(folder=folder, name=name):
                    self.assertEqual(set(vars(pin)), FIELDS)
                    self.assertEqual(pin.folder, folder)
                    self.assertIn(pin.kind, KINDS)
                    for field in FIELDS - {"sha256"}:
                        self.assertTrue(getattr(pin, field), field)

    def test_every_download_is_pinned_by_sha256(self):
        for folder in folders():
            for name, pin in pins(folder).items():
                with self.subTest(folder=folder, name=name):
                    if pin.kind in ("pypi", "debian-source"):
                        self.assertTrue(SHA256.fullmatch(pin.sha256), pin.sha256)
                    elif pin.kind == "pypi-requirements":
                        for line in self.requirements(folder, pin):
                            self.assertTrue(
                                re.fullmatch(r"[a-z0-9-]+==\S+ --hash=sha256:[0-9a-f]{64}", line), line
                            )

    def requirements(self, folder, pin):
        lines = [l for l in read(folder, pin.what[0]).splitlines() if l and not l.startswith("#")]
        self.assertTrue(lines)
        return lines

    def test_one_torch(self):
        """Python's torch and the C++ headers come from the same wheel, or interop proves nothing."""
        libtorch = pins("libtorch")["PIN"]
        line = "%s --hash=sha256:%s" % (libtorch.what[0], libtorch.sha256)
        self.assertIn(line, self.requirements("python_torch", pins("python_torch")["PIN"]))

    def test_readme_names_each_with_version_and_licence(self):
        readme = read("README.md")
        for folder in folders():
            for name, pin in pins(folder).items():
                with self.subTest(folder=folder, name=name):
                    row = [l for l in readme.splitlines() if l.startswith("| `%s/`" % folder)]
                    self.assertTrue(row, "no row in third_party/README.md")
                    self.assertTrue(any(pin.version in r and pin.licence in r for r in row), row)


if __name__ == "__main__":
    xml_unittest.main()
