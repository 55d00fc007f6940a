"""What third_party/benchmark brings, from where, under which licence, and why."""

PIN = struct(
    folder = "benchmark",
    version = "1.9.1",
    kind = "debian-source",
    what = ["benchmark", "trixie"],
    sha256 = "32131c08ee31eeff2c8968d7e874f3cb648034377dfc32a4c377fa8796d84981",
    licence = "Apache-2.0",
    why = "Micro-benchmarks of single functions.",
)
