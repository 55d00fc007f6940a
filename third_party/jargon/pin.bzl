"""What third_party/jargon brings, from where, under which licence, and why."""

PIN = struct(
    folder = "jargon",
    version = "4.0.0",
    kind = "debian-source",
    what = ["jargon", "trixie"],
    sha256 = "681518044d649e9790d2d76db974e44cd5ce31c8cae1720057934b5047f9461b",
    licence = "public domain",
    why = "1.3 MB of English text, the corpus of the reference program's language model.",
)
