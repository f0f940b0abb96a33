"""An example tokenizer: rows of examples as sequences that are learned from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.data import FinishReason, Generation, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping


def completion(row: Mapping[str, Any], tokenizer: Any) -> list[Trajectory]:
    """One sequence: the prompt, and what is learned."""
    if not {"prompt", "completion"} <= row.keys():
        raise KeyError(f"a row needs a prompt and a completion; it has {sorted(row)}")
    prompt, answer = (tokenizer.encode(row[key], add_special_tokens=False) for key in ("prompt", "completion"))
    answer = [*answer, tokenizer.eos_token_id]
    said = Generation(answer, [0.0] * len(answer), [-1] * len(answer), FinishReason.STOP)
    return [Trajectory.from_generation(prompt, said)]
