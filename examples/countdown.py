"""The numbers game Countdown: reach a target with given numbers, each used once, by + - * and /."""

from __future__ import annotations

import ast
import operator
import random
import re
from fractions import Fraction

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200
"""Characters of an expression: a longer one is no answer to this game."""


class Countdown:
    """Problems that have a solution, made from their index.

    Args:
        size: how many there are.
        numbers: of each problem.
        largest: of the numbers; the target is at most ten times as large.
        seed: problems of another seed are others: give held-out data its own.
    """

    def __init__(self, size: int = 10_000, numbers: int = 4, largest: int = 99, seed: int = 0) -> None:
        self._size, self._numbers, self._largest, self._seed = size, numbers, largest, seed

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, object]:
        if not 0 <= index < self._size:
            raise IndexError(f"problem {index} of {self._size}")
        chance = random.Random(f"{self._seed} {index}")
        while True:
            numbers = [chance.randint(1, self._largest) for _ in range(self._numbers)]
            expression = str(numbers[0])
            for number in numbers[1:]:
                expression = f"({expression} {chance.choice('+-*/')} {number})"
            target = value_of(ast.parse(expression, mode="eval").body)
            if target is not None and target.denominator == 1 and 0 < target <= 10 * self._largest:
                break
        chance.shuffle(numbers)
        prompt = (
            f"Use the numbers {', '.join(map(str, numbers))}, each exactly once, with + - * / and parentheses to reach "
            f"{target}. Think step by step and end with the expression in <answer> </answer> tags."
        )
        return {"prompt": prompt, "numbers": numbers, "target": int(target)}


def solved(completion: str, numbers: list[int], target: int) -> float:
    """1 for an expression that uses each number once and has the target as its value; 0.1 for one that does not."""
    answers = re.findall(r"<answer>(.*?)</answer>", completion, re.DOTALL)
    if not answers or len(answers[-1]) > LONGEST:
        return 0.0
    try:
        expression = ast.parse(answers[-1].strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return 0.0
    value = value_of(expression)
    if value is None:
        return 0.0
    used = [node.value for node in ast.walk(expression) if isinstance(node, ast.Constant)]
    return 1.0 if value == target and sorted(used) == sorted(numbers) else 0.1


def value_of(node: ast.expr) -> Fraction | None:
    """The exact value of an expression of whole numbers; None where it is anything else. Nothing is ever evaluated as
    Python, which would run whatever the policy writes."""
    match node:
        case ast.Constant(value=int(value)) if not isinstance(value, bool):
            return Fraction(value)
        case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
            values = value_of(left), value_of(right)
            if None in values or (isinstance(kind, ast.Div) and values[1] == 0):
                return None
            return OPERATORS[type(kind)](*values)
    return None
