"""Log-probabilities of prompts, from the logits of the forward that caches a prompt.

Such a forward holds the logits of all its tokens in memory, instead of those of the last one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_hf.rows import LiveRequest

_POSITIONS = 256
"""Positions whose log-softmax is computed together, which bounds the memory of its float32 copy."""


def record(requests: Sequence[LiveRequest], source: Sequence[int], logits: torch.Tensor) -> None:
    """Set `LiveRequest.prompt_logprobs` of the requests that lack them.

    Args:
        requests: the requests.
        source: batch row of each request in `logits`. Requests that share it may still have different last tokens.
        logits: [B, T, V], any floating dtype. Position t predicts token t + 1; T is at least the length of each prompt
            without its last token.
    """
    known: dict[tuple[int, int], torch.Tensor] = {}
    for request, row in zip(requests, source, strict=True):
        if request.lacks_prompt_logprobs:
            key = row, request.input_ids[-1]
            if key not in known:
                known[key] = _logprobs(logits[row], request.input_ids[1:])
            request.prompt_logprobs = known[key]


def _logprobs(logits: torch.Tensor, targets: list[int]) -> torch.Tensor:
    """Return log-probabilities [N] float32 on the CPU of N targets, of which position n of logits [T, V] predicts n."""
    ids = torch.tensor(targets, device=logits.device)[:, None]
    blocks = [slice(start, min(start + _POSITIONS, len(ids))) for start in range(0, len(ids), _POSITIONS)]
    return torch.cat([logits[block].float().log_softmax(-1).gather(1, ids[block])[:, 0] for block in blocks]).cpu()
