"""Sums of two numbers: an environment without a library. Each file beside this one adapts it to a library."""

from __future__ import annotations

import random


def task(number: int) -> tuple[str, str]:
    """Return the question and the answer of a task. The same number always gives the same task."""
    generator = random.Random(number)
    first, second = generator.randrange(10, 100), generator.randrange(10, 100)
    return f"{first}+{second}=", str(first + second)


def score(text: str, answer: str) -> float:
    """Return 1 if the text behind the working, which is in braces, is the answer."""
    return float(text.rpartition("}")[2].strip() == answer)
