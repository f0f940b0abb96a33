"""What the losses made of the tokens of a few groups of a batch, for whoever wants to see it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from areal_core.data import Ragged
from areal_core.training.distribution import gather_objects

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.interfaces.algorithm import LossResult, LossSpec

ROW = "logged_row"
"""Of each sequence its place in the batch, by which a micro-batch says whose tokens it has."""


class TokenLog:
    """Looks at the losses of one batch; the same on every rank.

    Nothing is computed for it: it keeps what the losses were given and what they found, and copies the chosen sequences
    to the CPU once the updates are through.

    Args:
        batch: prepared for the losses.
        groups: how many of its groups are looked at; sequences where it has no groups.

    Attributes:
        batch: for the losses in place of the given one.
    """

    def __init__(self, batch: PackedBatch, groups: int) -> None:
        of_group = batch["group_id"].tolist() if "group_id" in batch else [*range(len(batch))]
        rewards: dict[int, set[float]] = {group: set() for group in of_group}
        for group, reward in zip(of_group, batch["reward"].tolist() if "reward" in batch else (), strict=False):
            rewards[group].add(reward)
        # What can be compared is worth a look: groups in which rewards differ come first, spread over the batch.
        telling = [group for group, found in rewards.items() if len(found) > 1]
        spread = telling[:: max(1, len(telling) // max(1, groups))]
        chosen = {*[*dict.fromkeys([*spread, *telling, *rewards])][:groups]}
        self._rows = [row for row, group in enumerate(of_group) if group in chosen]
        self.batch = batch.with_sequences(**{ROW: torch.arange(len(batch))}) if self._rows else batch
        self._update = 0
        self._seen: list[tuple[int, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []

    def watch(self, works: Sequence[LossSpec]) -> Sequence[LossSpec]:
        """The losses of an update, looked at while they are computed."""
        self._update += 1
        return [replace(work, loss=partial(self._compute, work.loss)) if ROW in work.batch else work for work in works]

    def _compute(
        self,
        loss: Callable[[PackedBatch, Mapping[str, torch.Tensor]], LossResult],
        batch: PackedBatch,
        outputs: Mapping[str, torch.Tensor],
    ) -> LossResult:
        result = loss(batch, outputs)
        shape = (batch.token_count,)
        values = {name: value.detach() for name, value in {**outputs, **result.tokens}.items() if value.shape == shape}
        self._seen.append((self._update, batch[ROW], batch.lengths, values))
        return result

    def gather(self) -> PackedBatch | None:
        """The chosen sequences on rank 0, None on the others and where there are none; collective.

        Per-token values are shifted as those of the prepared batch are. What the losses found is among them, float32,
        NaN where no loss has seen a token; of several updates the last one counts.
        """
        if not self._rows:
            return None
        found: list[tuple[int, int, list[str], torch.Tensor]] = []
        for update, rows, lengths, values in self._seen:
            own = rows.tolist()
            if not values or not {*own}.intersection(self._rows):
                continue
            # One copy for all: each would wait for the device.
            on_cpu = torch.stack([value.float() for value in values.values()]).cpu()
            parts = zip(own, torch.split(on_cpu, lengths.tolist(), dim=1), strict=True)
            # Copied, for a view is sent with all that it is a view of.
            found += [(update, row, [*values], part.clone()) for row, part in parts if row in self._rows]
        self._seen.clear()
        everyone = gather_objects(found)
        if everyone is None:
            return None
        # Images and wide columns are not logged, and would be copied.
        narrow = {name: value for name, value in self.batch.tokens.values.items() if value.ndim == 1}
        chosen = replace(self.batch, tokens=Ragged(self.batch.lengths, narrow), multimodal={}).select(self._rows)
        tokens = chosen.tokens.values
        sequences = {name: value for name, value in chosen.sequences.items() if name != ROW}
        starts, sizes = chosen.tokens.offsets.tolist(), chosen.lengths.tolist()
        columns: dict[str, torch.Tensor] = {}
        if "logprobs" in tokens:  # of the policy that sampled; among a loss's terms that is the one that learns
            columns["behavior_logprobs"] = tokens["logprobs"].where(tokens["versions"] >= 0, torch.nan)
            columns["logprobs"] = torch.full_like(tokens["logprobs"], torch.nan)
        for _, row, names, part in sorted((one for rank in everyone for one in rank), key=lambda one: one[:2]):
            place = self._rows.index(row)
            for name, value in zip(names, part, strict=True):
                column = columns.setdefault(name, torch.full((chosen.token_count,), torch.nan))
                if len(value) == sizes[place]:
                    column[starts[place] : starts[place + 1]] = value
        return replace(chosen, tokens=replace(chosen.tokens, values=tokens | columns), sequences=sequences)
