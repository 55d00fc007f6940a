"""What third_party/xxhash brings, from where, under which licence, and why."""

PIN = struct(
    folder = "xxhash",
    version = "0.8.3",
    kind = "debian-source",
    what = ["xxhash", "trixie"],
    sha256 = "aae608dfe8213dfd05d909a57718ef82f30722c392344583d3f39050c7f29a80",
    licence = "BSD-2-Clause",
    why = "XXH3: checksums of checkpoints at the speed of memory. One header.",
)
