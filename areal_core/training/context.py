"""What an algorithm gets from the trainer beside a batch."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from areal_core.config.sections import TrainingSection
    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric
    from areal_core.interfaces.training import TrainEngine


@dataclass(frozen=True, slots=True)
class BatchContext:
    """A `Context`; see `areal_core.sdk.Context` for what an algorithm may rely on.

    Attributes:
        section: settings; how many updates a batch is cut into.
        engines: by role.
        seed: of the run.
        step, version, state: see `Context`.
        metrics: that the algorithm logged, by name.
    """

    section: TrainingSection
    engines: Mapping[str, TrainEngine]
    seed: int = 0
    step: int = 0
    version: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)

    @property
    def updates(self) -> int:
        """See `Context`."""
        return self.section.num_minibatches * self.section.num_epochs

    def forward(self, role: str, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Context.forward`."""
        return self.engines[role].forward(batch, outputs)

    def minibatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """See `Context.minibatches`."""
        ids = batch["group_id"].tolist()
        groups = sorted(set(ids))
        for epoch in range(self.section.num_epochs):
            if self.section.num_minibatches == 1:
                yield batch
                continue
            random.Random(f"{self.seed}/{self.step}/{epoch}").shuffle(groups)
            parts = self.section.num_minibatches
            cuts = [len(groups) * part // parts for part in range(parts + 1)]
            for start, end in pairwise(cuts):
                chosen = set(groups[start:end])
                if chosen:
                    yield batch.select([row for row, group in enumerate(ids) if group in chosen])

    def log(self, name: str, metric: Metric) -> None:
        """See `Context.log`."""
        self.metrics[name] = self.metrics[name] + metric if name in self.metrics else metric
