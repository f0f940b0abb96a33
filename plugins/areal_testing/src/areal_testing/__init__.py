"""Tests for components of areal: conformance suites to inherit from, fixtures, and fakes.

A test module derives a class from a suite in `areal_testing.conformance`, says how its component is made, and inherits
the tests. `areal_testing.fakes` has stand-ins for the parts of a run that a test is not about. If this distribution is
installed, pytest finds the fixtures of `areal_testing.pytest_plugin`.
"""

PUBLIC_MODULES = ("areal_testing.conformance", "areal_testing.fakes")
"""The modules whose `__all__` is public, with the fixtures of `areal_testing.pytest_plugin`."""
