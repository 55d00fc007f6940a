"""What third_party/libspng brings, from where, under which licence, and why."""

PIN = struct(
    folder = "libspng",
    version = "0.7.4",
    kind = "debian-source",
    what = ["libspng", "trixie"],
    sha256 = "47ec02be6c0a6323044600a9221b049f63e1953faf816903e7383d4dc4234487",
    licence = "BSD-2-Clause",
    why = "Reads PNG images of data sets. One file, over our zlib.",
)
