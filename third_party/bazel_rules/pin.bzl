"""What third_party/bazel_rules brings, from where, under which licence, and why."""

SKYLIB = struct(
    folder = "bazel_rules",
    version = "1.0.3",
    kind = "debian-source",
    what = ["bazel-skylib", "trixie"],
    sha256 = "b22f0f38d9a1ac565fce8a43df3d284f6b8e5e8775bda54b5cb687bed46b6ea4",
    licence = "Apache-2.0",
    why = "Loaded by absl's and googletest's own BUILD files.",
)

PLATFORMS = struct(
    folder = "bazel_rules",
    version = "0.0.2",
    kind = "debian-source",
    what = ["bazel-platforms", "trixie"],
    sha256 = "2e582a0841457e38ba2b263c7021bc57241f6934f86df8a1b5c5ae32169bf490",
    licence = "Apache-2.0",
    why = "Constraint values; absl and googletest name some that this version lacks, which deps.bzl adds.",
)

RULES_JAVA = struct(
    folder = "bazel_rules",
    version = "4.0.0",
    kind = "debian-source",
    what = ["bazel-rules-java", "trixie"],
    sha256 = "dcb49111bead562cc76418ccb598ecbb367d6b9d35be8808aa7fa354e9751fb5",
    licence = "Apache-2.0",
    why = "Loaded by the BUILD files of Bazel 4.2 itself.",
)
