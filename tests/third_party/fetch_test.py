#!/usr/bin/env python3
"""fetch.py refuses files that differ from their pin; unpack.py writes only into its folder."""

import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import unittest
import zipfile

RUNFILES = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
sys.path.insert(0, RUNFILES + "/tests/support")

import xml_unittest  # noqa: E402

METADATA = "Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n"
WHEEL = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
RECORD = "demo.py,,\ndemo-1.0.dist-info/METADATA,,\ndemo-1.0.dist-info/WHEEL,,\ndemo-1.0.dist-info/RECORD,,\n"


def make_wheel(folder, text):
    path = os.path.join(folder, "demo-1.0-py3-none-any.whl")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("demo.py", text)
        archive.writestr("demo-1.0.dist-info/METADATA", METADATA)
        archive.writestr("demo-1.0.dist-info/WHEEL", WHEEL)
        archive.writestr("demo-1.0.dist-info/RECORD", RECORD)
    with open(path, "rb") as f:
        return hashlib.sha256(f.read()).hexdigest()


class FetchTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.registry = os.path.join(scratch.name, "registry")
        self.cache = os.path.join(scratch.name, "cache")
        os.makedirs(self.registry)
        self.sha256 = make_wheel(self.registry, "answer = 42\n")

    def fetch(self, sha256):
        environment = dict(
            os.environ,
            DDP_DOWNLOAD_CACHE=self.cache,
            HOME=self.cache,
            PIP_NO_INDEX="1",
            PIP_FIND_LINKS=self.registry,
            PIP_CONFIG_FILE=os.devnull,
        )
        command = [RUNFILES + "/third_party/fetch.py", "--name", "demo_dependency", "--sha256", sha256]
        return subprocess.run(
            ["/usr/bin/python3"] + command + ["pypi", "demo==1.0"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip

    def kept(self):
        return sorted(
            name for _, _, files in os.walk(self.cache) for name in files if name.endswith(".whl")
        )

    def test_prints_the_path_of_the_pinned_file(self):
        done = self.fetch(self.sha256)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(done.stdout.strip(), "rb") as f:
            self.assertEqual(hashlib.sha256(f.read()).hexdigest(), self.sha256)

    def test_second_fetch_asks_no_registry(self):
        first = self.fetch(self.sha256)
        for name in os.listdir(self.registry):
            os.remove(os.path.join(self.registry, name))
        second = self.fetch(self.sha256)
        self.assertEqual((second.returncode, second.stdout), (0, first.stdout), second.stderr)

    def test_wrong_hash_is_refused_by_name(self):
        pinned = "0" * 64
        done = self.fetch(pinned)
        self.assertNotEqual(done.returncode, 0)
        self.assertEqual(done.stdout, "")
        for word in ("demo_dependency", pinned, self.sha256, "refused"):
            self.assertIn(word, done.stderr)
        self.assertNotIn("Traceback", done.stderr)
        self.assertEqual(self.kept(), [])

    def test_file_damaged_in_the_cache_is_fetched_again(self):
        path = self.fetch(self.sha256).stdout.strip()
        with open(path, "r+b") as f:
            f.write(b"damage")
        done = self.fetch(self.sha256)
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(done.stdout.strip(), "rb") as f:
            self.assertEqual(hashlib.sha256(f.read()).hexdigest(), self.sha256)

    def test_registry_without_the_file_is_an_error_by_name(self):
        for name in os.listdir(self.registry):
            os.remove(os.path.join(self.registry, name))
        done = self.fetch(self.sha256)
        self.assertNotEqual(done.returncode, 0)
        self.assertIn("dependency 'demo_dependency' could not be fetched", done.stderr)
        self.assertIn("demo==1.0", done.stderr)


class UnpackTest(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(dir=os.environ["TEST_TMPDIR"])
        self.addCleanup(scratch.cleanup)
        self.scratch = scratch.name
        self.out = os.path.join(scratch.name, "in", "out")

    def unpack(self, archive, *patterns, strip=0):
        script = RUNFILES + "/third_party/unpack.py"
        command = ["/usr/bin/python3", script, "--strip", str(strip), archive, self.out, *patterns]
        subprocess.run(command, check=True)
        return sorted(
            os.path.relpath(os.path.join(folder, name), self.scratch)
            for folder, _, names in os.walk(os.path.join(self.scratch, "in"))
            for name in names
        )

    def make_tar(self, *members):
        path = os.path.join(self.scratch, "archive.tar.gz")
        with tarfile.open(path, "w:gz") as archive:
            for name in members:
                info = tarfile.TarInfo(name)
                info.size = len(name)
                archive.addfile(info, io.BytesIO(name.encode()))
        return path

    def test_strips_and_selects(self):
        archive = self.make_tar("a-1.0/src/x.cc", "a-1.0/docs/x.txt", "a-1.0/LICENSE")
        self.assertEqual(
            self.unpack(archive, "*/src/*", "*/LICENSE", strip=1),
            ["in/out/LICENSE", "in/out/src/x.cc"],
        )

    def test_writes_nothing_outside_its_folder(self):
        archive = self.make_tar("a/../../escaped", "/absolute", "a/inside")
        self.assertEqual(self.unpack(archive), ["in/out/a/inside"])

    def test_wheel(self):
        make_wheel(self.scratch, "answer = 42\n")
        archive = os.path.join(self.scratch, "demo-1.0-py3-none-any.whl")
        self.assertEqual(self.unpack(archive, "demo.py"), ["in/out/demo.py"])


if __name__ == "__main__":
    xml_unittest.main()
