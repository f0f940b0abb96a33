"""What the trainer knows of the run besides parameters; a checkpoint keeps it beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data.digest import chain_digests
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(slots=True)
class TrainerState:
    """The trainer's progress, its own record of what it has trained on, and the algorithm's state.

    An audit compares `before`, `first` and `steps` with the ledger. The names of all fields but `algorithm` are keys of
    the file `trainer.json` in a checkpoint.

    Attributes:
        step: batches that have been trained on.
        before: one digest of all batches before those in `steps`; see `chain_digests`.
        first: number of these batches.
        steps: for each later batch, number and digest of each of its prompt groups.
        best: the highest score of an evaluation so far.
        unevaluated: metrics of the last step while its evaluation is due or running; see `Evaluation`.
        algorithm: tensors of the algorithm's own; see `Context.state`.
    """

    step: int = 0
    before: str = ""
    first: int = 0
    steps: list[list[tuple[int, str]]] = field(default_factory=list)
    best: float = -math.inf
    unevaluated: dict[str, float] | None = None
    algorithm: dict[str, torch.Tensor] = field(default_factory=dict)

    def take_snapshot(self) -> TrainerState:
        """Return a copy for a checkpoint, and fold `steps` into `before`, so that they do not grow with the run.

        Raises:
            RunError: the algorithm keeps something in its state that is not a tensor.
        """
        algorithm = {name: _copy_tensor(name, value) for name, value in self.algorithm.items()}
        snapshot = replace(self, steps=[*self.steps], algorithm=algorithm)
        for groups in self.steps:
            self.before = chain_digests(self.before, groups)
        self.first += len(self.steps)
        self.steps.clear()
        return snapshot

    def to_json(self) -> dict[str, Any]:
        """Return all fields but `algorithm` as JSON can hold them."""
        return {
            "step": self.step,
            "before": self.before,
            "first": self.first,
            "steps": self.steps,
            "best": self.best if math.isfinite(self.best) else None,
            "unevaluated": self.unevaluated,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any], algorithm: dict[str, torch.Tensor]) -> TrainerState:
        """Return the state that `to_json` was called on. Raises `LookupError`, `TypeError` or `ValueError`."""
        return cls(
            step=fields["step"],
            before=fields["before"],
            first=fields["first"],
            steps=[[(number, digest) for number, digest in groups] for groups in fields["steps"]],
            best=-math.inf if fields["best"] is None else fields["best"],
            unevaluated=fields["unevaluated"],
            algorithm=algorithm,
        )


def _copy_tensor(name: str, value: object) -> torch.Tensor:
    """Return a copy that safetensors can write: contiguous, on the CPU, and sharing memory with no other tensor."""
    if not isinstance(value, torch.Tensor):
        raise RunError(f"the algorithm keeps '{name}' in its state, which is not a tensor: {value!r:.80}")
    return value.detach().to("cpu", copy=True).contiguous()
