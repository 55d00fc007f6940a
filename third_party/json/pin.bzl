"""What third_party/json brings, from where, under which licence, and why."""

PIN = struct(
    folder = "json",
    version = "3.11.3",
    kind = "debian-source",
    what = ["nlohmann-json3", "trixie"],
    sha256 = "0d8ef5af7f9794e3263480193c491549b2ba6cc74bb018906202ada498a79406",
    licence = "MIT",
    why = "metrics.jsonl and other JSON that people's scripts read.",
)
