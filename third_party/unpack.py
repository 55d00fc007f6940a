"""Unpacks selected members of a wheel or tarball: unpack.py [--strip N] ARCHIVE DIR [PATTERN ...]

Patterns are shell patterns for member names before stripping; none means all.
LibTorch's wheel has 1.5 GB, of which a CPU build needs a third.
"""

import argparse
import fnmatch
import os
import shutil
import sys
import tarfile
import zipfile


def wanted(name, patterns):
    return not patterns or any(fnmatch.fnmatchcase(name, p) for p in patterns)


def target(folder, name, strip):
    parts = [p for p in name.split("/") if p not in ("", ".")][strip:]
    if not parts or ".." in parts or name.startswith("/"):
        return None
    return os.path.join(folder, *parts)


def unpack_zip(path, folder, strip, patterns):
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            out = target(folder, info.filename, strip)
            if info.is_dir() or out is None or not wanted(info.filename, patterns):
                continue
            os.makedirs(os.path.dirname(out), exist_ok=True)
            with archive.open(info) as source, open(out, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            if ".so" in os.path.basename(out):
                os.chmod(out, 0o755)


def unpack_tar(path, folder, strip, patterns):
    with tarfile.open(path) as archive:
        for member in archive:
            out = target(folder, member.name, strip)
            if not member.isfile() or out is None or not wanted(member.name, patterns):
                continue
            os.makedirs(os.path.dirname(out), exist_ok=True)
            with archive.extractfile(member) as source, open(out, "wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            os.chmod(out, 0o755 if member.mode & 0o100 else 0o644)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("archive")
    parser.add_argument("folder")
    parser.add_argument("--strip", type=int, default=0)
    parser.add_argument("patterns", nargs="*")
    arguments = parser.parse_args()
    unpack = unpack_zip if zipfile.is_zipfile(arguments.archive) else unpack_tar
    unpack(arguments.archive, arguments.folder, arguments.strip, arguments.patterns)


if __name__ == "__main__":
    sys.exit(main())
