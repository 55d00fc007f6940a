"""Repository rules around fetch.py: files from PyPI and Debian, pinned by sha256."""

def _python(ctx):
    # Debian's interpreter first: it has the pip that the README requires.
    for candidate in ["/usr/bin/python3", ctx.which("python3")]:
        if candidate and ctx.path(candidate).exists:
            done = ctx.execute([candidate, "-c", "import pip"])
            if done.return_code == 0:
                return candidate
    fail("dependency '%s' needs python3 with pip (Debian: apt-get install python3-pip)" % ctx.name)

def run_python(ctx, script, arguments):
    """Runs a script of this folder; if it fails, fails with its output.

    Args:
      ctx: the repository context.
      script: label of the script.
      arguments: list of strings.

    Returns:
      The script's standard output, stripped.
    """
    done = ctx.execute([_python(ctx), ctx.path(script)] + arguments, timeout = 3600)
    if done.return_code != 0:
        fail(done.stderr.strip() or done.stdout.strip())
    return done.stdout.strip()

def fetch_and_unpack(ctx, pin_name, kind, what, sha256, strip, patterns, folder = "."):
    """Fetches one pinned archive and unpacks members `patterns` into `folder` of the repository."""
    archive = run_python(
        ctx,
        ctx.attr._fetch,
        ["--name", pin_name, "--sha256", sha256, kind] + what,
    )
    run_python(
        ctx,
        ctx.attr._unpack,
        ["--strip", str(strip), archive, str(ctx.path(folder))] + patterns,
    )

def _fetched_repository(ctx):
    fetch_and_unpack(
        ctx,
        ctx.attr.dependency,
        ctx.attr.kind,
        ctx.attr.what,
        ctx.attr.sha256,
        ctx.attr.strip,
        ctx.attr.patterns,
    )
    for label, destination in ctx.attr.overlay.items():
        ctx.delete(destination)
        ctx.symlink(ctx.path(label), destination)
    for destination, text in ctx.attr.append.items():
        before = ctx.read(destination)
        ctx.delete(destination)
        ctx.file(destination, before + "\n" + text)
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

SCRIPTS = {
    "_fetch": attr.label(default = Label("//third_party:fetch.py")),
    "_unpack": attr.label(default = Label("//third_party:unpack.py")),
}

fetched_repository = repository_rule(
    implementation = _fetched_repository,
    doc = "One pinned archive from Debian's sources or PyPI, overlaid with our BUILD files.",
    attrs = dict(
        SCRIPTS,
        dependency = attr.string(mandatory = True, doc = "folder under third_party that pins it"),
        kind = attr.string(mandatory = True, values = ["pypi", "debian-source"]),
        what = attr.string_list(mandatory = True, doc = "[requirement], or [source package, suite]"),
        sha256 = attr.string(mandatory = True),
        strip = attr.int(default = 0, doc = "leading path components to drop"),
        patterns = attr.string_list(doc = "members to unpack; none means all"),
        overlay = attr.label_keyed_string_dict(allow_files = True, doc = "our file -> its path there"),
        append = attr.string_dict(doc = "path there -> text to add at its end"),
    ),
)

def _overlay_repository(ctx):
    for label, destination in ctx.attr.files.items():
        ctx.symlink(ctx.path(label), destination)
    ctx.file("WORKSPACE", "workspace(name = \"%s\")\n" % ctx.name)

overlay_repository = repository_rule(
    implementation = _overlay_repository,
    doc = "A repository made of files of this one: replacements for rule sets that others load.",
    attrs = {"files": attr.label_keyed_string_dict(allow_files = True)},
)

def pinned(name, pin, **kwargs):
    """Declares the repository of one pin, unless the workspace has declared its name.

    Args:
      name: repository name that BUILD files use.
      pin: struct from the dependency's pin.bzl.
      **kwargs: further attributes of fetched_repository.
    """
    if not native.existing_rule(name):
        fetched_repository(
            name = name,
            dependency = pin.folder,
            kind = pin.kind,
            what = pin.what,
            sha256 = pin.sha256,
            **kwargs
        )
