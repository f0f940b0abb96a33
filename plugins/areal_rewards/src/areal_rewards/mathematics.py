"""A reward for mathematics: equality of expressions, judged by the library math-verify."""

from __future__ import annotations

import functools
import math
from typing import Any

from areal_core.plugins import register
from areal_rewards.config import MathVerifySettings
from areal_rewards.libraries import load_library

_LARGEST_EXPONENT = 10_000
_LARGEST_EXPONENT_OF_A_SUM = 100
"""Of a sum with variables, which a comparison multiplies out."""


@register(
    "reward_functions",
    summary="1 if the answer is mathematically equal to the row's answer",
    config=MathVerifySettings,
)
def math_verify(completion: str, answer: Any) -> float:
    """1 if what the completion gives as its result equals the row's answer, else 0.

    Fractions, roots, intervals, sets and LaTeX are understood on both sides; 1/2, 0.5 and \\frac{1}{2} are equal.
    The library's own time-out is off: it rests on a signal, which works in main threads only. The pool in which
    rewards are computed ends a comparison that takes too long.

    Raises:
        ValueError: nothing mathematical was found in the row's answer. No completion could ever be right.
        ConfigError: the library is missing.
    """
    library = _library()
    wanted = _parse_answer(str(answer))
    found = [part for part in library.parse(completion, parsing_timeout=None) if _is_small(part)]
    return float(library.verify(list(wanted), found, timeout_seconds=None))


def _library() -> Any:
    return load_library("the reward math_verify", "math_verify", "math")


@functools.lru_cache(maxsize=4096)
def _parse_answer(answer: str) -> tuple[Any, ...]:
    """An answer as expressions; it is the same for every completion of its group."""
    parse = _library().parse
    # A bare LaTeX answer such as (-\infty, 2] is found only where something marks it as mathematics.
    expressions = parse(f"\\boxed{{{answer}}}", parsing_timeout=None) or parse(answer, parsing_timeout=None)
    if not expressions:
        raise ValueError(f"the row's answer, {answer[:60]!r}, is nothing that math-verify understands")
    return tuple(expressions)


def _is_small(expression: Any) -> bool:
    """Whether an expression, which the parser leaves unevaluated, can be evaluated in a moment. Text can."""
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
    """A number that the absolute value hardly exceeds, without evaluating the expression; variables count as 1."""
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
    except (OverflowError, TypeError):  # the latter for the infinity of no direction, 1/0
        bound = math.inf
    return bound
