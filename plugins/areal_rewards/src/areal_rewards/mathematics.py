"""A reward for mathematics: equality of expressions, judged by the library math-verify."""

from __future__ import annotations

import functools
from typing import Any

from areal_rewards.libraries import load_library


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
    found = library.parse(completion, parsing_timeout=None)
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
