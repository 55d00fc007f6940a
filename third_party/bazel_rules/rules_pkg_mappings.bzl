"""Replaces @rules_pkg, which protobuf's BUILD file uses for release archives."""

def pkg_files(**_kwargs):
    pass

def pkg_filegroup(**_kwargs):
    pass

def pkg_attributes(**_kwargs):
    pass

def strip_prefix_from_pkg(path = ""):
    return path

strip_prefix = struct(from_pkg = strip_prefix_from_pkg, from_root = strip_prefix_from_pkg)
