"""precompiled_header: torch's headers, parsed once for all sources.

Parsing them takes 15 of the 20 seconds of a source that includes c10d; with a precompiled header, which
itself takes 30 seconds, less than half of the whole. `build --define=precompiled_header=on` of .bazelrc
turns it on, so that projects that depend on this one are not concerned, unless they do the same. g++
alone reads the result: clang, or g++ with flags that differ in what matters, parses the header instead.
"""

load("@bazel_tools//tools/build_defs/cc:action_names.bzl", "CPP_COMPILE_ACTION_NAME")
load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header(ctx):
    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    context = cc_common.merge_cc_infos(
        cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
    ).compilation_context

    # g++ takes the first of HEADER.gch and HEADER that an include folder has, and the source tree is one
    # of these folders: so there is a copy of the header beside the result.
    header = ctx.actions.declare_file("%s/%s" % (ctx.label.name, ctx.file.hdr.basename))
    ctx.actions.symlink(output = header, target_file = ctx.file.hdr)
    outputs = [header]
    if "clang" not in toolchain.compiler:
        precompiled = ctx.actions.declare_file(header.basename + ".gch", sibling = header)
        variables = cc_common.create_compile_variables(
            feature_configuration = features,
            cc_toolchain = toolchain,
            source_file = ctx.file.hdr.path,
            output_file = precompiled.path,
            user_compile_flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ["-w"],
            include_directories = context.includes,
            quote_include_directories = context.quote_includes,
            system_include_directories = context.system_includes,
            preprocessor_defines = context.defines,
        )
        ctx.actions.run(
            executable = cc_common.get_tool_for_action(
                feature_configuration = features,
                action_name = CPP_COMPILE_ACTION_NAME,
            ),
            arguments = cc_common.get_memory_inefficient_command_line(
                feature_configuration = features,
                action_name = CPP_COMPILE_ACTION_NAME,
                variables = variables,
            ),
            env = cc_common.get_environment_variables(
                feature_configuration = features,
                action_name = CPP_COMPILE_ACTION_NAME,
                variables = variables,
            ),
            inputs = depset(
                [ctx.file.hdr],
                transitive = [context.headers, toolchain.all_files],
            ),
            outputs = [precompiled],
            mnemonic = "CppPrecompile",
            progress_message = "Precompiling " + ctx.file.hdr.short_path,
        )
        outputs.append(precompiled)
    root = ctx.label.workspace_root  # empty in the main workspace
    own = CcInfo(compilation_context = cc_common.create_compilation_context(
        headers = depset(outputs),
        quote_includes = depset([ctx.bin_dir.path + ("/" + root if root else "")]),
    ))
    return [
        DefaultInfo(files = depset(outputs)),
        cc_common.merge_cc_infos(cc_infos = [own] + [dep[CcInfo] for dep in ctx.attr.deps]),
    ]

precompiled_header = rule(
    implementation = _precompiled_header,
    doc = "A library of one header, which sources get by `-include`: //base:cc.bzl.",
    attrs = {
        "hdr": attr.label(mandatory = True, allow_single_file = [".hpp"]),
        "deps": attr.label_list(providers = [CcInfo]),
        "_cc_toolchain": attr.label(default = Label("@bazel_tools//tools/cpp:current_cc_toolchain")),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
