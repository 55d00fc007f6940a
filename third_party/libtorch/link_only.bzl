"""link_only: what its deps link, without their headers and include folders.

A cc_library adds the folders of all repositories that it depends on to each command line of its users,
also for libraries without headers. So the same source would be compiled again where `deps` depend on
the build's settings.
"""

def _link_only(ctx):
    return [
        CcInfo(linking_context = cc_common.merge_cc_infos(
            cc_infos = [dep[CcInfo] for dep in ctx.attr.deps],
        ).linking_context),
        DefaultInfo(runfiles = ctx.runfiles(collect_data = True, collect_default = True)),
    ]

link_only = rule(
    implementation = _link_only,
    attrs = {"deps": attr.label_list(providers = [CcInfo])},
)
