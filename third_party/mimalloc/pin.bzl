"""What third_party/mimalloc brings, from where, under which licence, and why."""

PIN = struct(
    folder = "mimalloc",
    version = "2.0.9",
    kind = "debian-source",
    what = ["mimalloc", "bookworm"],
    sha256 = "cbc9d207ff105ad1f0cb739c378076143a6452b8d0624309cea0abfb040e972b",
    licence = "MIT",
    why = "glibc maps and unmaps every large tensor each step; with mimalloc a CPU step of a small CNN takes a quarter less.",
)
