"""Finds the source tree that a test was built from.

For tests that read the whole tree, which cannot be declared as inputs. Such a
test has `//:.clang-format` in its data and tags = ["external"], so that its
result is never cached.
"""

import os
import sys


def root():
    """Follows the runfiles' link to .clang-format; exits if it leads to no tree of ours."""
    runfiles = os.path.join(os.environ["TEST_SRCDIR"], os.environ["TEST_WORKSPACE"])
    folder = os.path.dirname(os.path.realpath(os.path.join(runfiles, ".clang-format")))
    # Fail instead of checking an empty tree.
    for landmark in ("WORKSPACE", "base/BUILD", "third_party/deps.bzl"):
        if not os.path.isfile(os.path.join(folder, landmark)):
            sys.exit("%s is not this repository's source tree: it has no %s" % (folder, landmark))
    return folder
