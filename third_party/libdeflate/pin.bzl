"""What third_party/libdeflate brings, from where, under which licence, and why."""

PIN = struct(
    folder = "libdeflate",
    version = "1.23",
    kind = "debian-source",
    what = ["libdeflate", "trixie"],
    sha256 = "1ab18349b9fb0ce8a0ca4116bded725be7dcbfa709e19f6f983d99df1fb8b25f",
    licence = "MIT",
    why = "CRC-32 of checkpoints at the speed of memory, with the processor's carry-less multiplication. Only crc32 is built.",
)
