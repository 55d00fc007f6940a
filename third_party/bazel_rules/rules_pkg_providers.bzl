"""Replaces @rules_pkg."""

PackageVariablesInfo = provider(fields = ["values"])
