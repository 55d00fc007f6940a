"""What third_party/zlib brings, from where, under which licence, and why."""

PIN = struct(
    folder = "zlib",
    version = "1.3.1",
    kind = "debian-source",
    what = ["zlib", "trixie"],
    sha256 = "60dd315c07f616887caa029408308a018ace66e3d142726a97db164b3b8f69fb",
    licence = "Zlib",
    why = "Reads gzip-compressed data sets.",
)
