"""What plugin authors test with: deterministic fakes, and conformance suites to inherit from.

A test module of a plugin derives a class from a suite in `areal_core.testing.conformance`, says how its component is
made, and inherits the tests.
"""
