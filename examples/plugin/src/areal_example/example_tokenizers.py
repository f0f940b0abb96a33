"""A tokenizer of rows, for fine-tuning: a row becomes the sequences that are learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data import FinishReason, Generation, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping


def completion_only(row: Mapping[str, Any], tokenizer: Any) -> list[Trajectory]:
    """Learn `answer` as the continuation of `prompt`, as plain text.

    Raises:
        KeyError: the row lacks one of them.
    """
    if not {"prompt", "answer"} <= row.keys():
        raise KeyError(f"a row needs a prompt and an answer; it has {sorted(row)}")
    prompt, answer = (tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "answer"))
    answer = [*answer, tokenizer.eos_token_id]
    learned = Generation(answer, [0.0] * len(answer), [-1] * len(answer), FinishReason.STOP)
    return [Trajectory.from_generation(prompt, learned)]
