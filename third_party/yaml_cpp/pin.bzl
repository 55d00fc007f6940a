"""What third_party/yaml_cpp brings, from where, under which licence, and why."""

PIN = struct(
    folder = "yaml_cpp",
    version = "0.8.0",
    kind = "debian-source",
    what = ["yaml-cpp", "trixie"],
    sha256 = "32c85a5f36633a9005b20261b35fccb0d8ec69e9ef16c67de7d5d007944e3709",
    licence = "MIT",
    why = "Reads configuration files, in YAML or JSON, with the line of each value.",
)
