"""Where the source tree lies that a test was built from.

For the few tests that read the tree as a whole, which no list of declared
inputs stands for. Such a test has `//:.clang-format` in its data and
tags = ["external"], so that its result is never taken from a cache.
"""

import os
import sys


def root():
    """Follows the runfiles' link to .clang-format; exits if it leads to no tree of ours."""
    runfiles = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
    folder = os.path.dirname(os.path.realpath(os.path.join(runfiles, ".clang-format")))
    # An empty walk must not pass for a clean one.
    for landmark in ("WORKSPACE", "base/BUILD", "third_party/deps.bzl"):
        if not os.path.isfile(os.path.join(folder, landmark)):
            sys.exit("%s is not this repository's source tree: it has no %s" % (folder, landmark))
    return folder
