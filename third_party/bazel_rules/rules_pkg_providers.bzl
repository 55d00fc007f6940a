"""Stands in for @rules_pkg."""

PackageVariablesInfo = provider(fields = ["values"])
