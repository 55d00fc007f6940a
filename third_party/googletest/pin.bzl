"""What third_party/googletest brings, from where, under which licence, and why."""

PIN = struct(
    folder = "googletest",
    version = "1.16.0",
    kind = "debian-source",
    what = ["googletest", "trixie"],
    sha256 = "2f54382b5d13d6cd0be2afc524f1e510d37f8ba78c2d439c5bea64ef37e30d01",
    licence = "BSD-3-Clause",
    why = "Unit tests and conformance suites.",
)
