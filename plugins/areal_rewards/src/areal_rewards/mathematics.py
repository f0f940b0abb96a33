"""Reward for mathematics: compare expressions with the library math-verify."""

from __future__ import annotations

import functools
import math
from typing import Any

from areal_core.plugins import register
from areal_rewards.config import MathVerifySettings
from areal_rewards.libraries import load_library

_LARGEST_EXPONENT = 10_000
"""Limit of exponents and factorials in an answer: evaluating larger ones takes too long."""
_LARGEST_EXPONENT_OF_A_SUM = 100
"""Limit of the exponent of a sum with variables, because a comparison expands it."""


@register(
    "reward_functions",
    summary="1 if the answer is mathematically equal to the row's answer",
    config=MathVerifySettings,
)
def math_verify(completion: str, answer: Any) -> float:
    """Return 1 if the result in the completion equals the row's answer, else 0.

    Both sides may have fractions, roots, intervals, sets and LaTeX; 1/2, 0.5 and \\frac{1}{2} are equal. The library's
    own timeout is off, because it needs signals, which work only in main threads. The reward pool ends a comparison
    that takes too long.

    Args:
        completion: text of the policy's answer.
        answer: the row's answer.

    Raises:
        ValueError: the row's answer has no mathematical expression, so that no completion could be right.
        ConfigError: the library is not installed.
    """
    library = _library()
    expected = _parse_answer(str(answer))
    expressions = [part for part in library.parse(completion, parsing_timeout=None) if _is_small(part)]
    return float(library.verify(list(expected), expressions, timeout_seconds=None))


def _library() -> Any:
    return load_library("the reward math_verify", "math_verify", "math")


@functools.lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """Return the expressions of an answer. Cached, because all completions of a group have the same answer."""
    parse = _library().parse
    # math-verify finds a bare LaTeX answer such as (-\infty, 2] only inside \boxed.
    expressions = parse(f"\\boxed{{{answer}}}", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not expressions:
        raise ValueError(f"the row's answer, {answer[:60]!r}, has no expression that math-verify can read")
    return tuple(expressions)


def _is_small(expression: Any) -> bool:
    """Return whether an expression, which the parser leaves unevaluated, is cheap to evaluate. Text is."""
    if isinstance(expression, str):
        return True
    sympy = load_library("the reward math_verify", "sympy", "math")
    for node in expression.atoms(sympy.Pow, sympy.factorial):
        exponent = node.exp if node.is_Pow else node.args[0]
        is_sum = node.is_Pow and node.base.is_Add and bool(node.base.free_symbols)
        if _bound(exponent) > (_LARGEST_EXPONENT_OF_A_SUM if is_sum else _LARGEST_EXPONENT):
            return False
    return True


def _bound(expression: Any) -> float:
    """Return an approximate upper bound of the absolute value without evaluating it; variables count as 1."""
    parts = [_bound(part) for part in expression.args]
    bound = max(parts, default=1.0)
    try:
        if expression.is_Number:
            bound = abs(float(expression))
        elif expression.is_Add:
            bound = math.fsum(parts)
        elif expression.is_Mul:
            bound = math.prod(parts)
        elif expression.is_Pow:
            bound = max(parts[0], 1.0) ** parts[1]
        elif type(expression).__name__ == "factorial":
            bound = math.gamma(parts[0] + 1)
    except (OverflowError, TypeError):  # TypeError: 1/0 has no float
        bound = math.inf
    return bound
