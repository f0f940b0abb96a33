"""The part of a GPU's memory that a server takes where it shares the GPU with the trainer or with other servers.

Servers size their caches by the memory that is free when they start. On a shared GPU that number is worthless: the
trainer needs its memory later, in the first step. So the plan of the trainer's memory decides, and each server gets
its limit as an option:

    room  = (GPU - trainer - a tenth of the GPU for each process) / servers on the GPU
    cache = min(room - weights, what is useful)

The trainer counts with its peak, or, if servers sleep while it trains, with what it holds between steps.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from areal_core.interfaces.model import ELEMENT_BYTES
from areal_core.models.sizes import cached_numbers, context_length

if TYPE_CHECKING:
    from areal_core.config import RunConfig
    from areal_core.interfaces.model import Estimate, StoredModel

GIB: Final = 1 << 30
SPARED: Final = 0.1
"""Share of the GPU that is spared for each process on it: CUDA's context, graphs, activations, fragments."""
SEVERAL: Final = 3
"""Servers on one GPU that a small model was measured with: `docs/benchmarks.md`, One H200."""
_SMALL_BYTES: Final = 1 << 30
"""Weights up to which areal recommends several servers on one GPU. Larger models were not measured."""
_SLACK: Final = 2
"""Factor on the tokens that the config bounds, for prompts and for shared prefixes that stay cached."""


class GPUShare(NamedTuple):
    """A server's part of each of its GPUs.

    Attributes:
        gpu_bytes: memory of the GPU, in bytes, as in all sizes here.
        trainer_bytes: memory of the trainer while servers generate; 0 if it is on other GPUs.
        servers: number of servers on the GPU.
        weight_bytes: size of a server's weights on the GPU.
        token_bytes: size of the keys and values of one token on the GPU.
        context: longest sequence of the model, in tokens; 0 if its config does not say.
        useful_tokens: number of tokens that the server's live requests can have together, and at least the context. A
            larger cache costs time: vLLM empties it block by block at each weight sync.
    """

    gpu_bytes: int
    trainer_bytes: int
    servers: int
    weight_bytes: int
    token_bytes: int
    context: int
    useful_tokens: int

    @property
    def room_bytes(self) -> int:
        """Memory that one server may take; below 0 if the trainer leaves nothing."""
        processes = self.servers + bool(self.trainer_bytes)
        return int((1 - SPARED * processes) * self.gpu_bytes - self.trainer_bytes) // self.servers

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values the server keeps."""
        return min(self.useful_tokens, max(0, self.room_bytes - self.weight_bytes) // self.token_bytes)

    @property
    def cache_bytes(self) -> int:
        """Memory of these keys and values."""
        return self.cache_tokens * self.token_bytes

    @property
    def gains_from_several(self) -> bool:
        """Whether `SEVERAL` servers on this GPU would fit and generate faster than the one that is planned.

        The one Python thread of a server is the limit of a small model long before the GPU is.
        """
        several = self._replace(servers=SEVERAL)
        fits = SEVERAL * several.cache_tokens >= self.cache_tokens > 0
        return self.servers == 1 and bool(self.trainer_bytes) and self.weight_bytes <= _SMALL_BYTES and fits


def share_of_gpu(
    config: RunConfig, model: StoredModel, gpu_bytes: int, trainer: Estimate, tensor_parallel: int
) -> GPUShare:
    """Return the part of a GPU that one of the config's servers gets.

    Args:
        config: config of the run; its placement names the GPUs.
        model: the model that the servers hold.
        gpu_bytes: memory of the GPU.
        trainer: the plan of the trainer's memory.
        tensor_parallel: GPUs that share the weights and the cache of one copy of the model.

    Raises:
        RunError: the model's config does not say how large its keys and values are.
    """
    generation = config.placement.generation or [0]
    # A trainer without named GPUs may be on those of the servers.
    is_beside = config.placement.colocated or config.placement.training is None
    trainer_bytes = trainer.resident_bytes if config.takes_turns else trainer.peak_bytes
    element = ELEMENT_BYTES[config.model.dtype]
    weights = element * sum(map(math.prod, model.shapes.values()))
    live_tokens = config.rollout.episodes_at_once * max(1, config.longest_sequence)
    context = context_length(model.description)
    return GPUShare(
        gpu_bytes,
        trainer_bytes if is_beside else 0,
        max(Counter(generation).values()),
        weights // tensor_parallel,
        element * cached_numbers(model.description, tensor_parallel),
        context,
        useful_tokens=max(context, _SLACK * live_tokens * tensor_parallel // len(generation)),
    )
