"""Tests for components of areal: conformance suites to inherit from, fixtures, and fakes.

A test module derives a class from a suite in `areal_testing.conformance`, sets its component, and inherits the tests.
`areal_testing.fakes` has stand-ins for the parts of a run that a test is not about. If this distribution is installed,
pytest finds the fixtures of `areal_testing.pytest_plugin`.
"""

PUBLIC_MODULES = ("areal_testing.conformance", "areal_testing.fakes")
"""Modules whose `__all__` is public, in addition to the fixtures of `areal_testing.pytest_plugin`."""
