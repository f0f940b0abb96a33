"""From a row of a data set to the tokens that are learnt. What others have written never yields special tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import FinishReason, Trajectory
from areal_core.workflows.prompts import encode, guard, render

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Pieces = list[tuple[list[int], bool]]
    """Tokens in their order, and of each piece whether it is learnt."""


def conversations(row: Mapping[str, Any], tokenizer: Any) -> list[Trajectory]:
    """One sequence, of which what the model shall say is learnt.

    Args:
        row: has `messages` (role and content; every turn of the assistant is learnt), or `prompt` and `completion`,
            both as text, which the tokenizer's end token follows, or both as messages.
        tokenizer: of the model.

    Raises:
        ValueError: the row has another form, or nothing in it is the assistant's.
    """
    if "messages" in row:
        pieces = _turns(row["messages"], tokenizer)
    elif "prompt" in row and "completion" in row:
        pieces = answered(row["prompt"], row["completion"], tokenizer)
    else:
        raise ValueError(
            f"fine-tuning needs rows with 'messages', or with 'prompt' and 'completion'; this one has {', '.join(row)}"
        )
    return [trajectory(pieces)]


def answered(prompt: Any, completion: Any, tokenizer: Any) -> Pieces:
    """A prompt, which is not learnt, and its answer, which is; both text or both messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        asked, _ = encode(tokenizer, guard(tokenizer, prompt))
        said, _ = encode(tokenizer, guard(tokenizer, completion))
        return [(asked, False), ([*said, tokenizer.eos_token_id], True)]
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion must both be text, or both lists of messages")
    return _turns([*prompt, *completion], tokenizer, first=len(prompt))


def trajectory(pieces: Pieces) -> Trajectory:
    """One sequence of these pieces.

    Raises:
        ValueError: nothing in it is learnt.
    """
    ids = torch.tensor([token for tokens, _ in pieces for token in tokens])
    mask = torch.tensor([is_learnt for tokens, is_learnt in pieces for _ in tokens])
    if not bool(mask.any()):
        raise ValueError("there is nothing to learn in it: no turn of the assistant, or an empty one")
    return Trajectory(
        {
            "input_ids": ids,
            "loss_mask": mask,
            "logprobs": torch.zeros(len(ids)),
            "versions": torch.full((len(ids),), -1, dtype=torch.int32),
            "turn_ids": torch.full((len(ids),), -1, dtype=torch.int32),
        },
        {"finish_reason": torch.tensor(int(FinishReason.STOP), dtype=torch.int8)},
    )


def _turns(messages: Sequence[Mapping[str, Any]], tokenizer: Any, first: int = 0) -> Pieces:
    """A conversation as the tokenizer's template writes it; of its turns those of the assistant are learnt.

    Only turns from the `first` message on are. A turn is what stands between the conversation that asks for it and the
    one that has it: the template's end of the turn is learnt with it, a line break behind that is not.
    """
    pieces: Pieces = []
    written = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        before = render(tokenizer, messages[:number], add_generation_prompt=True)
        after = render(tokenizer, messages[: number + 1], add_generation_prompt=False).rstrip("\n")
        if not (before.startswith(written) and after.startswith(before)):
            raise ValueError("the chat template rewrites earlier turns, so it cannot be said which tokens are whose")
        pieces.append((encode(tokenizer, before[len(written) :])[0], False))
        pieces.append((encode(tokenizer, after[len(before) :])[0], True))
        written = after
    return pieces
