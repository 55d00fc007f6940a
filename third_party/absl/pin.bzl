"""What third_party/absl brings, from where, under which licence, and why."""

PIN = struct(
    folder = "absl",
    version = "20240722.0",
    kind = "debian-source",
    what = ["abseil", "trixie"],
    sha256 = "df6d1f5ef540725f3851201176a60486aab332410788465c9877910bb471c34a",
    licence = "Apache-2.0",
    why = "Status, flags, logging, strings, synchronization: the vocabulary of every public interface here.",
)
