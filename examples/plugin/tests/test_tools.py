"""The tool."""

from areal_example.tools import product


def test_product():
    assert product(6, 7) == "42"
