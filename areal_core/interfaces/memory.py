"""What a plan asks of a training engine's settings before there is an engine; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.model import Role


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank of the trainer is to hold and compute in a role.

    Attributes:
        description: the model's config.json.
        shapes: of the tensors in its safetensors, by name.
        role: what it is for.
        dtype: what is computed in.
        ranks: over which the model may be sharded.
        tokens: of an update on a rank, at most; None where nobody knows.
        longest: tokens of the longest sequence, as far as the config says.
        gpu_bytes: memory of its GPU, None for a CPU.
    """

    description: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    role: Role
    dtype: Literal["float32", "bfloat16"]
    ranks: int
    tokens: int | None = None
    longest: int = 0
    gpu_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's device at the moment of a step at which they are most.

    Attributes:
        parameters: that are computed with, their float32 masters, and those that are gathered from other ranks.
        gradients: of parameters.
        optimizer: its state.
        activations: what is kept for the backward pass, and what a layer computes with.
        head: logits, their gradient, and what the head's gradients are summed in.
        resident: of all these, what stays between steps.
        recomputing: the choice of activation checkpointing that was reckoned with, in words; empty where none counts.
        learning: what learns, in words, where that is not the model itself.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    head: int
    resident: int
    recomputing: str = field(default="", compare=False)
    learning: str = field(default="", compare=False)

    @property
    def total(self) -> int:
        """All parts together."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.head


@runtime_checkable
class PlansMemory(Protocol):
    """Settings of a training engine that know what it will take, on a machine without torch and without a GPU."""

    def memory(self, load: RankLoad) -> Memory | None:
        """What the engine will hold with these settings; None for a model whose layers it does not know.

        Raises:
            RunError: the engine cannot train this model with these settings, and why.
        """

    def remedies(self, load: RankLoad, room: int) -> list[str]:
        """Changes of these settings that bring it below `room` bytes: each `key=value`, or several and blanks."""
