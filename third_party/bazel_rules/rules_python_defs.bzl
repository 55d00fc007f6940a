"""Replaces @rules_python: the native rules under the names that other BUILD files load."""

py_library = native.py_library
py_binary = native.py_binary
py_test = native.py_test
