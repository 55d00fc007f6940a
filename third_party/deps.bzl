"""ddp_dependencies(): all external repositories of this project.

In another workspace, call it after declaring the repositories that you want to
provide yourself: names that exist are skipped.

    load("@libtorch_ddp//third_party:deps.bzl", "ddp_dependencies")
    ddp_dependencies()
"""

load("//third_party:fetch.bzl", "overlay_repository", "pinned")
load("//third_party/absl:pin.bzl", ABSL = "PIN")
load("//third_party/bazel_rules:pin.bzl", "PLATFORMS", "RULES_JAVA", "SKYLIB")
load("//third_party/benchmark:pin.bzl", BENCHMARK = "PIN")
load("//third_party/cuda:pin.bzl", "CUPTI", "RUNTIME")
load("//third_party/fashion_mnist:pin.bzl", FASHION_MNIST = "PIN")
load("//third_party/gloo:pin.bzl", GLOO = "PIN")
load("//third_party/googletest:pin.bzl", GOOGLETEST = "PIN")
load("//third_party/jargon:pin.bzl", JARGON = "PIN")
load("//third_party/json:pin.bzl", JSON = "PIN")
load("//third_party/libdeflate:pin.bzl", LIBDEFLATE = "PIN")
load("//third_party/libjpeg_turbo:pin.bzl", LIBJPEG_TURBO = "PIN")
load("//third_party/libspng:pin.bzl", LIBSPNG = "PIN")
load("//third_party/libtorch:libtorch.bzl", "libtorch_repository")
load("//third_party/libtorch:pin.bzl", LIBTORCH = "PIN")
load("//third_party/mimalloc:pin.bzl", MIMALLOC = "PIN")
load("//third_party/mpi:mpi.bzl", "mpi_repository")
load("//third_party/nccl:pin.bzl", NCCL = "PIN")
load("//third_party/oneccl:oneccl.bzl", "oneccl_repository")
load("//third_party/protobuf:pin.bzl", PROTOBUF = "PIN")
load("//third_party/protobuf:protoc.bzl", "protoc_repository")
load("//third_party/python_torch:python_torch.bzl", "python_torch_repository")
load("//third_party/xxhash:pin.bzl", XXHASH = "PIN")
load("//third_party/yaml_cpp:pin.bzl", YAML_CPP = "PIN")
load("//third_party/zlib:pin.bzl", ZLIB = "PIN")

def _overlay(path):
    """Label of a file of this repository, also if it is a dependency of another workspace."""
    return str(Label("//third_party/" + path))

# A constraint value that googletest uses and platforms 0.0.2 lacks.
_PLATFORMS_OS = """
constraint_value(name = "fuchsia", constraint_setting = ":os")
"""

def _maybe_overlay(name, files):
    if not native.existing_rule(name):
        overlay_repository(name = name, files = {_overlay(k): v for k, v in files.items()})

def _rule_sets():
    # Bazel 6 and later bring their own, which their toolchains use; module_name is new in them.
    # (Debian's 4.2 reports no version.)
    if not hasattr(native, "module_name"):
        pinned("platforms", PLATFORMS, strip = 1, append = {"os/BUILD": _PLATFORMS_OS})
    pinned("bazel_skylib", SKYLIB, strip = 1)
    pinned("rules_java", RULES_JAVA)
    _maybe_overlay("rules_cc", {
        "bazel_rules:empty.BUILD": "cc/BUILD",
        "bazel_rules:rules_cc_defs.bzl": "cc/defs.bzl",
    })
    _maybe_overlay("remote_coverage_tools", {
        "bazel_rules:coverage_tools.BUILD": "BUILD",
    })

def ddp_dependencies():
    """Declares the repositories of third_party that the workspace has not declared yet."""
    _rule_sets()
    pinned("com_google_absl", ABSL, strip = 1)
    pinned("com_google_googletest", GOOGLETEST, strip = 1)
    pinned(
        "com_github_google_benchmark",
        BENCHMARK,
        strip = 1,
        patterns = ["*/include/*", "*/src/*", "*/LICENSE"],
        overlay = {_overlay("benchmark:benchmark.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "com_google_protobuf",
        PROTOBUF,
        strip = 1,
        patterns = ["*/src/*", "*/LICENSE"],
        overlay = {
            _overlay("protobuf:protobuf.BUILD"): "BUILD.bazel",
            _overlay("protobuf:protoc_main.cc"): "protoc_main.cc",
        },
    )
    if not native.existing_rule("protoc"):
        protoc_repository(
            name = "protoc",
            version = PROTOBUF.version,
            otherwise = "@com_google_protobuf//:protoc",
        )
    pinned(
        "nlohmann_json",
        JSON,
        strip = 1,
        patterns = ["*/single_include/*", "*/LICENSE.MIT"],
        overlay = {_overlay("json:json.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "libdeflate",
        LIBDEFLATE,
        strip = 1,
        patterns = [
            "*/COPYING",
            "*/common_defs.h",
            "*/lib/arm/*",
            "*/lib/cpu_features_common.h",
            "*/lib/crc32*",
            "*/lib/lib_common.h",
            "*/lib/x86/*",
            "*/libdeflate.h",
        ],
        overlay = {_overlay("libdeflate:libdeflate.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "libjpeg_turbo",
        LIBJPEG_TURBO,
        strip = 1,
        patterns = ["*/j*.c", "*/j*.h", "*/LICENSE.md", "*/README.ijg"],
        overlay = {
            _overlay("libjpeg_turbo:jconfig.h"): "jconfig.h",
            _overlay("libjpeg_turbo:jconfigint.h"): "jconfigint.h",
            _overlay("libjpeg_turbo:jversion.h"): "jversion.h",
            _overlay("libjpeg_turbo:libjpeg_turbo.BUILD"): "BUILD.bazel",
        },
    )
    pinned(
        "libspng",
        LIBSPNG,
        strip = 1,
        patterns = ["*/spng/*", "*/LICENSE"],
        overlay = {_overlay("libspng:libspng.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "mimalloc",
        MIMALLOC,
        strip = 1,
        patterns = ["*/include/*", "*/src/*", "*/LICENSE"],
        overlay = {_overlay("mimalloc:mimalloc.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "xxhash",
        XXHASH,
        strip = 1,
        patterns = ["*/xxhash.h", "*/LICENSE"],
        overlay = {_overlay("xxhash:xxhash.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "yaml_cpp",
        YAML_CPP,
        strip = 1,
        patterns = ["*/include/*", "*/src/*", "*/LICENSE"],
        overlay = {_overlay("yaml_cpp:yaml_cpp.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "zlib",
        ZLIB,
        strip = 1,
        patterns = ["*/*.c", "*/*.h", "*/LICENSE"],
        overlay = {_overlay("zlib:zlib.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "gloo_headers",
        GLOO,
        patterns = ["gloo/*.h", "LICENSE"],
        overlay = {
            _overlay("gloo:gloo.BUILD"): "BUILD.bazel",
            _overlay("gloo:config.h"): "gloo/config.h",
        },
    )
    pinned(
        "fashion_mnist",
        FASHION_MNIST,
        strip = 1,
        patterns = ["*/data/fashion/*", "*/LICENSE"],
        overlay = {_overlay("fashion_mnist:fashion_mnist.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "jargon",
        JARGON,
        strip = 1,
        patterns = ["*/jarg400.info"],
        overlay = {_overlay("jargon:jargon.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "cuda_runtime",
        RUNTIME,
        strip = 2,
        patterns = ["nvidia/cu13/include/*", "nvidia/cu13/lib/*"],
        overlay = {_overlay("cuda:runtime.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "cuda_cupti",
        CUPTI,
        strip = 2,
        patterns = ["nvidia/cu13/lib/libcupti.so*"],
        overlay = {_overlay("cuda:cupti.BUILD"): "BUILD.bazel"},
    )
    pinned(
        "nccl",
        NCCL,
        strip = 2,
        patterns = ["nvidia/nccl/include/*", "nvidia/nccl/lib/*"],
        overlay = {_overlay("nccl:nccl.BUILD"): "BUILD.bazel"},
    )
    if not native.existing_rule("libtorch"):
        libtorch_repository(
            name = "libtorch",
            dependency = LIBTORCH.folder,
            what = LIBTORCH.what,
            sha256 = LIBTORCH.sha256,
            build_file = _overlay("libtorch:libtorch.BUILD"),
            members = [
                "torch/include/*",
                "torch/lib/libtorch_cpu.so",
                "torch/lib/libc10.so",
                "torch/lib/libgomp.so.1",
            ],
        )
    if not native.existing_rule("libtorch_cuda"):
        libtorch_repository(
            name = "libtorch_cuda",
            dependency = LIBTORCH.folder,
            what = LIBTORCH.what,
            sha256 = LIBTORCH.sha256,
            build_file = _overlay("libtorch:libtorch_cuda.BUILD"),
            members = [
                "torch/lib/libtorch_cuda.so",
                "torch/lib/libtorch_cuda_linalg.so",
                "torch/lib/libc10_cuda.so",
                "torch/lib/libcaffe2_nvrtc.so",
                "torch/lib/libtorch_nvshmem.so",
            ],
        )
    if not native.existing_rule("mpi"):
        mpi_repository(name = "mpi")
    if not native.existing_rule("oneccl"):
        oneccl_repository(
            name = "oneccl",
            requirements = _overlay("oneccl:requirements.txt"),
            build_file = _overlay("oneccl:oneccl.BUILD"),
        )
    if not native.existing_rule("python_torch"):
        python_torch_repository(
            name = "python_torch",
            requirements = _overlay("python_torch:requirements.txt"),
        )
