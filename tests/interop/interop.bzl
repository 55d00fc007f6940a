"""python_torch_test: a Python test run by the interpreter that has the pinned torch."""

def python_torch_test(name, src, data = [], size = "medium", env = {}):
    """A Python test with torch, numpy and tensorboard, in the sandbox without network.

    C++ peers in `data` are found under $TEST_SRCDIR/$TEST_WORKSPACE. It is "manual", so that
    `test //...` needs no 2.5 GB: run `//tests/interop`.

    Args:
      name: of the test.
      src: a script; xml_unittest (see //tests/support) is importable, and what `data` has of this folder.
      data: labels of what it runs and reads.
      size: as of any test.
      env: further variables.
    """
    native.sh_test(
        name = name,
        size = size,
        srcs = ["@python_torch//:python"],
        args = ["$(rootpath %s)" % src],
        data = [
            src,
            "//tests/support:xml_unittest.py",
        ] + data,
        env = dict(env, PYTHONPATH = "tests/support:tests/interop"),
        tags = ["manual"],
    )
