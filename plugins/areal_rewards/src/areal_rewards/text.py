"""Rewards that compare or measure a completion's text or length."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from areal_core.plugins import register
from areal_rewards.config import FormatSettings, LengthPenaltySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

After = Annotated[
    str | None,
    Field(
        description="Compare only the part of the answer after the last occurrence of this text; an answer without "
        "it gets 0. null: compare all of it."
    ),
]
IgnoreCase = Annotated[bool, Field(description="Ignore the difference between upper and lower case.")]


@register("reward_functions", summary="1 if the answer is equal to the row's answer")
def exact_match(completion: str, answer: Any, *, after: After = None, ignore_case: IgnoreCase = False) -> float:
    """Return 1 if completion and answer are equal, ignoring surrounding white space, else 0.

    Args:
        completion: text of the policy's answer.
        answer: answer of the row. A number is compared in Python's spelling.
        after: compare only the part after the last occurrence of this text; a completion without it gets 0.
        ignore_case: ignore upper and lower case.
    """
    if after is not None:
        if after not in completion:
            return 0.0
        completion = completion.rpartition(after)[2]
    text, expected = completion.strip(), str(answer).strip()
    if ignore_case:
        text, expected = text.casefold(), expected.casefold()
    return float(text == expected)


@register(
    "reward_functions",
    "format",
    summary="1 if the answer matches a regular expression",
    config=FormatSettings,
)
def matches_format(completion: str, *, pattern: str, whole: bool) -> float:
    """Return 1 if the completion matches a regular expression, else 0.

    Args:
        completion: text of the policy's answer.
        pattern: regular expression; its dots also match line ends.
        whole: whether the whole completion must match; if false, a part is enough.
    """
    match = re.fullmatch if whole else re.search
    return float(match(pattern, completion, re.DOTALL) is not None)


@register(
    "reward_functions",
    summary="penalty for long answers, from 0 to -1 (DAPO's soft overlong punishment)",
    config=LengthPenaltySettings,
)
def length_penalty(completion_ids: Sequence[int], *, longest: int, margin: int) -> float:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476, equation 13), from -1 to 0.

    The penalty of n tokens is 0 up to `longest - margin`, then (longest - margin - n) / margin, and -1 from `longest`
    on.

    Args:
        completion_ids: sampled token ids.
        longest: length in tokens from which the penalty is -1.
        margin: number of tokens over which the penalty grows.
    """
    excess = len(completion_ids) - (longest - margin)
    return -min(max(excess, 0) / margin, 1.0)
