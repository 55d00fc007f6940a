"""Fetches one pinned file with the client of its registry (pip, apt-get).

Called by the repository rules of fetch.bzl:

    fetch.py --name absl --sha256 df6d… debian-source abseil trixie
    fetch.py --name libtorch --sha256 48c2… pypi torch==2.15.0

Prints the path of the file. Files are cached by hash in $DDP_DOWNLOAD_CACHE,
else $XDG_CACHE_HOME/libtorch_ddp, else ~/.cache/libtorch_ddp, so a second clone
or a clean build fetches nothing.

Uses the registries that pip and apt are configured for. For Debian sources it
makes a private apt folder from the machine's source list with another suite, so
the machine's apt state is not changed and root is not needed.
"""

import argparse
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

# pip matches these tags literally; the pinned wheels use several.
_WHEEL_PLATFORMS = ["manylinux_2_%d_x86_64" % n for n in (28, 27, 25, 24, 18, 17)] + [
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
]
_ATTEMPTS = 3


class FetchError(Exception):
    pass


def cache_root():
    explicit = os.environ.get("DDP_DOWNLOAD_CACHE")
    if explicit:
        return explicit
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        home = os.environ.get("HOME") or os.path.expanduser("~")
        base = os.path.join(home, ".cache")
    return os.path.join(base, "libtorch_ddp")


def sha256_of(path):
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        for block in iter(lambda: f.read(1 << 20), b""):
            digest.update(block)
    return digest.hexdigest()


def run(command, cwd=None):
    """Runs a client, with retries, since mirrors fail temporarily."""
    for attempt in range(_ATTEMPTS):
        done = subprocess.run(
            command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode == 0:
            return
        if attempt + 1 < _ATTEMPTS:
            time.sleep(2 * (attempt + 1))
    tail = "\n".join(done.stdout.strip().splitlines()[-8:])
    raise FetchError("%s failed with exit code %d:\n%s" % (command[0], done.returncode, tail))


def fetch_pypi(requirement, folder):
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--python-version", "3.11"]
    for platform in _WHEEL_PLATFORMS:
        command += ["--platform", platform]
    run(command + ["--dest", folder, requirement])


def debian_entries():
    """Yields (uri, suite, keyring) of each Debian archive in the machine's source list."""
    signed = "/usr/share/keyrings/debian-archive-keyring.gpg"
    files = ["/etc/apt/sources.list"]
    parts = "/etc/apt/sources.list.d"
    if os.path.isdir(parts):
        files += sorted(os.path.join(parts, name) for name in os.listdir(parts))
    for path in files:
        if not os.path.isfile(path):
            continue
        with open(path, errors="replace") as f:
            text = f.read()
        if path.endswith(".list"):
            for line in text.splitlines():
                match = re.match(r"\s*deb\s+(?:\[[^]]*\]\s+)?(\S+)\s+(\S+)\s", line + " ")
                if match:
                    yield match.group(1), match.group(2), signed
        elif path.endswith(".sources"):
            for stanza in re.split(r"\n\s*\n", text):
                field = dict(re.findall(r"(?mi)^([\w-]+):[ \t]*(.*)$", stanza))
                if field.get("Enabled", "yes").lower() != "no":
                    for uri in field.get("URIs", "").split():
                        yield uri, (field.get("Suites", "").split() or [""])[0], signed


def private_apt(root, suite):
    """Returns apt options for a source list of `suite` alone, with lists fetched."""
    # The machine's main mirror: an archive named debian with a plain release (not -security or
    # -updates). Other archives, such as Docker's, may be listed, too.
    for uri, own_suite, signed in debian_entries():
        if re.search(r"/debian/?$", uri) and own_suite and not re.search(r"[-/]", own_suite):
            break
    else:
        raise FetchError(
            "no Debian archive in /etc/apt/sources.list or sources.list.d; add the "
            "machine's mirror there (this repository fetches sources of Debian's %s)" % suite
        )
    home = os.path.join(root, "apt", suite)
    for folder in ("lists/partial", "cache/archives/partial", "parts"):
        os.makedirs(os.path.join(home, folder), exist_ok=True)
    sources = os.path.join(home, "sources.list")
    with open(sources, "w") as f:
        f.write("deb-src [signed-by=%s] %s %s main\n" % (signed, uri, suite))
    options = [
        "-o", "Dir::Etc::sourcelist=" + sources,
        "-o", "Dir::Etc::sourceparts=" + os.path.join(home, "parts"),
        "-o", "Dir::State::lists=" + os.path.join(home, "lists"),
        "-o", "Dir::Cache=" + os.path.join(home, "cache"),
        "-o", "Acquire::Languages=none",
        "-o", "Acquire::Retries=3",
    ]  # fmt: skip
    if os.geteuid() == 0:
        # The cache may be in a home folder that apt's own user cannot enter.
        options += ["-o", "APT::Sandbox::User=root"]
    stamp = os.path.join(home, "updated")
    if not os.path.exists(stamp) or time.time() - os.path.getmtime(stamp) > 3600:
        run(["apt-get"] + options + ["update"])
        with open(stamp, "w"):
            pass
    return options


def fetch_debian_source(package, suite, folder, root):
    with open(os.path.join(root, "apt.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        options = private_apt(root, suite)
    run(["apt-get"] + options + ["source", "--download-only", "--tar-only", package], cwd=folder)


def fetch(arguments):
    root = cache_root()
    kept_in = os.path.join(root, "sha256", arguments.sha256)
    os.makedirs(kept_in, exist_ok=True)
    with open(os.path.join(kept_in, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in sorted(os.listdir(kept_in)):
            path = os.path.join(kept_in, name)
            if name.startswith("."):
                continue
            if sha256_of(path) == arguments.sha256:
                return path
            os.remove(path)  # damaged since it was stored

        with tempfile.TemporaryDirectory(dir=kept_in, prefix=".partial-") as folder:
            if arguments.kind == "pypi":
                fetch_pypi(arguments.what[0], folder)
            else:
                fetch_debian_source(arguments.what[0], arguments.what[1], folder, root)
            files = [n for n in os.listdir(folder) if os.path.isfile(os.path.join(folder, n))]
            if len(files) != 1:
                raise FetchError("expected one file from the registry, got %s" % sorted(files))
            path = os.path.join(folder, files[0])
            found = sha256_of(path)
            if found != arguments.sha256:
                raise FetchError(
                    "%s has sha256 %s, but third_party pins %s. The file was refused. If the "
                    "new content is what you want, review it and change the pin."
                    % (files[0], found, arguments.sha256)
                )
            final = os.path.join(kept_in, files[0])
            shutil.move(path, final)
            return final


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--sha256", required=True)
    parser.add_argument("kind", choices=["pypi", "debian-source"])
    parser.add_argument("what", nargs="+")
    arguments = parser.parse_args()
    try:
        print(fetch(arguments))
    except (FetchError, OSError) as error:
        sys.exit("dependency '%s' could not be fetched: %s" % (arguments.name, error))


if __name__ == "__main__":
    main()
