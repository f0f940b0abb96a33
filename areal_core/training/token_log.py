"""A few groups of a batch with what the losses computed of their tokens, for trackers and the hook `batch_logged`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load, save

from areal_core.data import Ragged
from areal_core.training.collectives import gather_bytes, is_main

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.data import PackedBatch
    from areal_core.interfaces.algorithm import LossResult, LossSpec

ROW = "logged_row"
"""Name of the field with each sequence's index in the batch, which tells the sequences of a micro-batch."""


class TokenLog:
    """Records what the losses of one batch compute of a few groups; the same on every rank.

    It computes nothing itself. It keeps the outputs and the terms of the losses on the device, and copies those of the
    chosen sequences to the CPU once all updates are done.

    Args:
        batch: prepared for the losses.
        groups: number of its groups to record; of sequences, if it has no groups.

    Attributes:
        batch: to be used for the losses in place of the given one.
    """

    def __init__(self, batch: PackedBatch, groups: int) -> None:
        self._rows = _choose_rows(batch, groups)
        self.batch = batch.with_sequences(**{ROW: torch.arange(len(batch))}) if self._rows else batch
        self._update = 0
        self._recorded: list[tuple[int, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]] = []

    def watch(self, works: Sequence[LossSpec]) -> Sequence[LossSpec]:
        """Return the losses of an update such that they are recorded while they are computed."""
        self._update += 1
        return [replace(work, loss=partial(self._compute, work.loss)) if ROW in work.batch else work for work in works]

    def gather(self) -> PackedBatch | None:
        """Return the chosen sequences on the main rank; None on the others, and if none were chosen. Collective.

        Per-token values are shifted as those of the prepared batch. Values of the losses are float32, and NaN for a
        token that no loss has seen. If several updates have seen it, the last one counts.
        """
        if not self._rows:
            return None
        gathered = gather_bytes(save(self._take_recorded()))
        if not is_main():
            return None
        # Images and wide fields are not logged, and copying them would take memory.
        narrow = {name: value for name, value in self.batch.tokens.values.items() if value.ndim == 1}
        chosen = replace(self.batch, tokens=Ragged(self.batch.lengths, narrow), multimodal={}).select(self._rows)
        tokens = chosen.tokens.values
        fields: dict[str, torch.Tensor] = {}
        if "logprobs" in tokens:  # among a loss's terms, `logprobs` are those of the policy that learns
            fields["behavior_logprobs"] = tokens["logprobs"].where(tokens["versions"] >= 0, torch.nan)
            fields["logprobs"] = torch.full_like(tokens["logprobs"], torch.nan)
        starts, sizes = chosen.tokens.offsets.tolist(), chosen.lengths.tolist()
        recorded = [(_parse(key), values) for payload in gathered for key, values in load(payload).items()]
        for (_, row, name), values in sorted(recorded, key=lambda item: item[0]):
            index = self._rows.index(row)
            field = fields.setdefault(name, torch.full((chosen.token_count,), torch.nan))
            if len(values) == sizes[index]:
                field[starts[index] : starts[index + 1]] = values
        sequences = {name: value for name, value in chosen.sequences.items() if name != ROW}
        return replace(chosen, tokens=replace(chosen.tokens, values=tokens | fields), sequences=sequences)

    def _compute(
        self,
        loss: Callable[[PackedBatch, Mapping[str, torch.Tensor]], LossResult],
        batch: PackedBatch,
        outputs: Mapping[str, torch.Tensor],
    ) -> LossResult:
        result = loss(batch, outputs)
        shape = (batch.token_count,)
        values = {name: value.detach() for name, value in {**outputs, **result.tokens}.items() if value.shape == shape}
        self._recorded.append((self._update, batch[ROW], batch.lengths, values))
        return result

    def _take_recorded(self) -> dict[str, torch.Tensor]:
        """Return this rank's values of the chosen sequences, by `_key`, on the CPU."""
        taken: dict[str, torch.Tensor] = {}
        for update, row_indices, lengths, values in self._recorded:
            rows = row_indices.tolist()
            if not values or not {*rows}.intersection(self._rows):
                continue
            # One copy for all values: each copy would wait for the device.
            on_cpu = torch.stack([value.float() for value in values.values()]).cpu()
            for row, part in zip(rows, torch.split(on_cpu, lengths.tolist(), dim=1), strict=True):
                if row in self._rows:
                    taken |= {_key(update, row, name): value.clone() for name, value in zip(values, part, strict=True)}
        self._recorded.clear()
        return taken


def _choose_rows(batch: PackedBatch, groups: int) -> list[int]:
    """Return the indices of the sequences of some groups.

    Groups whose rewards differ come first, because their sequences can be compared. They are spread over the batch.
    """
    group_of_row = batch["group_id"].tolist() if "group_id" in batch else [*range(len(batch))]
    rewards: dict[int, set[float]] = {group: set() for group in group_of_row}
    for group, reward in zip(group_of_row, batch["reward"].tolist() if "reward" in batch else (), strict=False):
        rewards[group].add(reward)
    differing = [group for group, values in rewards.items() if len(values) > 1]
    spread = differing[:: max(1, len(differing) // max(1, groups))]
    chosen = {*[*dict.fromkeys([*spread, *differing, *rewards])][:groups]}
    return [row for row, group in enumerate(group_of_row) if group in chosen]


def _key(update: int, row: int, name: str) -> str:
    return f"{update}/{row}/{name}"


def _parse(key: str) -> tuple[int, int, str]:
    """Return update, row and name of a `_key`."""
    update, row, name = key.split("/", 2)
    return int(update), int(row), name
