"""A tool: a function that the policy may call. It reads the name, the annotations and the docstring."""

from __future__ import annotations

from areal_core.plugins import register


@register("tools")
def product(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: the first number.
        b: the second number.
    """
    return str(a * b)
