"""The common part of training engines: splitting batches into micro-batches, forward passes and updates."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.data import Metric, PackedBatch, Ragged, combine, reduce_over_ranks
from areal_core.errors import RunError
from areal_fsdp.models.routing import choices_of
from areal_fsdp.models.schedule import learning_rate_at
from areal_fsdp.models.wide import check_outputs
from areal_fsdp.parallel.loading import unread_names
from areal_fsdp.parallel.mesh import Ranks
from areal_fsdp.parallel.ranks import own_device, rank_and_ranks
from areal_fsdp.planning.meter import Meter
from areal_fsdp.planning.split import Split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.engines import ModelReference, OptimizerSettings
    from areal_core.sdk import LossSpec, Role
    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.models.schedule import LearningSettings

PEAK = "peak_memory"
"""Internal metric of a rank's peak memory in bytes, which ranks reduce together with the others."""


def means(**values: float) -> dict[str, Metric]:
    """Return metrics of one update, which are averaged over the updates of a step."""
    return {name: Metric.mean(value) for name, value in values.items()}


class RoleEngine:
    """One model in one role on all ranks of `torch.distributed`. Subclasses set it up, compute outputs and update it.

    Args:
        settings: the engine's section of the config.
    """

    _longest: int | None

    def __init__(self, settings: LearningSettings) -> None:
        self._config = settings
        self._device = torch.device("cpu")
        self._module: RoleModule | None = None
        self._ranks = Ranks()
        self._updates = torch.zeros((), dtype=torch.int64)
        self._meter = Meter(None, 1)

    def _begin(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Store the arguments of `setup`, and set the default learning rate."""
        self._device = own_device()
        self._reference, self._role, self._run = model, role, settings
        if self._config.learning_rate is None:  # adapters usually need ten times the learning rate of a whole model
            rate = settings.learning_rate * (10 if getattr(self._config, "adapter", None) else 1)
            self._config = self._config.model_copy(update={"learning_rate": rate})
        self._dtype = getattr(torch, model.dtype)

    def measurements(self) -> dict[str, float]:
        """See `MeasuringEngine`."""
        return self._meter.take()

    def unread_weights(self) -> list[str]:
        """See `SelectiveEngine`."""
        source, trusted = self._reference.path, self._reference.trust_remote_code
        return unread_names(self._ready().model, source, trust_remote_code=trusted)

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return outputs of the whole batch on every rank, float32 [sum(T)] on the CPU; collective."""
        self._check_outputs(outputs, narrow=True)
        began = time.perf_counter()
        result = torch.zeros(len(outputs), batch.token_count)
        if not len(batch):
            return dict(zip(outputs, result, strict=True))
        needed = {"input_ids": batch["input_ids"], "targets": batch["targets"], "index": torch.arange(result.shape[1])}
        slim = PackedBatch(Ragged(batch.lengths, needed | choices_of(batch)), multimodal=batch.multimodal)
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        with torch.no_grad():
            for part, place, counts in self._rounds(slim, self._plan(batch, outputs)):
                computed = self._compute(part, place, outputs)
                if counts and self._ranks.leads:
                    parts.append((part["index"], torch.stack([computed[name] for name in outputs])))
        for indices, values in parts:  # synchronize with the device only after all micro-batches are queued
            result[:, indices.cpu()] = values.cpu()
        self._reshard(outputs)
        if rank_and_ranks()[1] > 1:
            dist.all_reduce(result)  # a token's value is on one rank; the others have 0
        self._meter.passed(time.perf_counter() - began)
        return dict(zip(outputs, result, strict=True))

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """Make one optimizer update on the sum of all losses, and return its metrics; collective.

        If all batches are empty, the parameters do not change.

        Raises:
            RunError: the role is frozen, or the engine cannot compute an output.
        """
        if not self._role.trains:
            raise RunError(f"an engine in the role '{self._role.name}' is frozen and cannot be trained")
        for work in works:
            self._check_outputs(work.outputs)
        rate = self._rate()
        self._updates += 1  # empty updates count too: the schedule's length counts every update of the run
        planned = [(work, self._plan(work.batch, work.outputs)) for work in works if len(work.batch)]
        if not any(split.rounds for _, split in planned):
            return {**means(loss=0.0, gradient_norm=0.0, learning_rate=rate), "skipped": Metric.sum(0.0)}
        began = time.perf_counter()
        metrics = self._train(planned, rate)
        held = float(metrics.pop(PEAK).values) if PEAK in metrics else 0.0
        done = [(work.batch.lengths.tolist(), split) for work, split in planned]
        self._meter.trained(time.perf_counter() - began, done, held)
        return metrics

    def _rate(self) -> float:
        return learning_rate_at(int(self._updates), self._config, self._run.total_updates)

    def _train(self, planned: Sequence[tuple[LossSpec, Split]], rate: float) -> dict[str, Metric]:
        """Make one update on at least one batch, and return its metrics."""
        left = sum(split.rounds for _, split in planned)
        parts: list[Mapping[str, Metric]] = []
        for work, split in planned:
            for part, place, counts in self._rounds(work.batch, split):
                left -= 1
                self._expect(part, place, counts=counts, is_last=not left)
                computed = self._compute(part, place, work.outputs)
                result = work.loss(part, computed) if counts else None
                learns = result is not None and result.loss.requires_grad
                self._backward(computed, result.loss if result is not None and learns else None, work.outputs)
                if result is not None and self._ranks.leads:
                    parts.append({**result.metrics, "loss": Metric.sum(result.loss)})
        self._finish([work.outputs for work, _ in planned])
        update = self._update(rate)  # queue the update before reading a value synchronizes with the device
        if self._device.type == "cuda":
            parts.append({PEAK: Metric.maximum(torch.cuda.max_memory_allocated(self._device))})
        metrics = reduce_over_ranks(combine(parts))
        return {**metrics, **means(loss=float(metrics["loss"].values)), **update}

    def _expect(self, part: PackedBatch, place: tuple[Any, ...], *, counts: bool, is_last: bool) -> None:
        """Prepare for a micro-batch of an update; `counts` is False for a dummy micro-batch."""

    def _compute(self, part: PackedBatch, place: tuple[Any, ...], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the outputs of one micro-batch; see `RoleModule.forward`."""
        raise NotImplementedError

    def _backward(self, found: Mapping[str, torch.Tensor], loss: torch.Tensor | None, outputs: Sequence[str]) -> None:
        """Accumulate the gradient of a loss. Without one, run the backward pass anyway: collectives need all ranks.

        Args:
            found: the outputs of the micro-batch, by name.
            loss: the loss, or None for a micro-batch without one.
            outputs: names of the outputs that were requested.
        """

    def _finish(self, outputs: Sequence[Sequence[str]]) -> None:
        """Complete the gradients of an update; `outputs` are the requested outputs of each loss."""

    def _update(self, rate: float) -> dict[str, Metric]:
        """Clip and apply the gradients, unless they are not finite."""
        raise NotImplementedError

    def _reshard(self, outputs: Sequence[str] = ()) -> None:
        """Free gathered parameters after a pass that computed these outputs."""

    def _read_by(self, outputs: Sequence[str]) -> list[RoleEngine]:
        """Return the engines whose models compute a batch for these outputs."""
        del outputs
        return [self]

    def _plan(self, batch: PackedBatch, outputs: Sequence[str] = ()) -> Split:
        longest = [engine._longest for engine in self._read_by(outputs) if engine._longest is not None]
        self._check_tokens(batch)
        return Split.plan(
            batch.lengths.tolist(),
            batch.unit_rows,
            rank=self._ranks.share,
            ranks=self._ranks.shares,
            max_tokens=self._config.tokens_at_once,
            is_padded=any(engine._ready().in_rows for engine in self._read_by(outputs)),
            longest=min(longest, default=None),
        )

    def _rounds(self, batch: PackedBatch, split: Split) -> list[tuple[PackedBatch, tuple[Any, ...], bool]]:
        """Return this rank's micro-batches on the device: (micro-batch, (layout, images), False for a dummy).

        Every rank has the same number. All are copied before the first is computed, because a copy to a GPU waits for
        the kernels that are queued.
        """
        rounds = []
        for rows, counts in split.rows_by_round():
            part = batch if len(rows) == len(batch) else batch.select(rows)
            place = self._ready().layout(part.lengths, self._device), self._ready().see(part, self._device)
            rounds.append((replace(part, multimodal={}).to(self._device), place, counts))
        return rounds

    def _check_tokens(self, batch: PackedBatch) -> None:
        """Raise RunError for a token without an embedding; on a GPU it would be a device-side assert."""
        words = self._ready().model.config.get_text_config().vocab_size
        largest = int(batch["input_ids"].max()) if batch.token_count else 0
        if largest >= words:
            raise RunError(
                f"a batch has the token {largest}, but the model's vocabulary has {words:,} tokens",
                hints=["use the model's own tokenizer, without tokens that the model's embedding lacks"],
            )

    @staticmethod
    def _targets(part: PackedBatch, outputs: Sequence[str]) -> torch.Tensor:
        """Return the argument `targets` of `RoleModule.forward`.

        Raises:
            RunError: the output `top_logprobs` is requested, and the batch does not name the tokens.
        """
        if "top_logprobs" not in outputs:
            return part["targets"]
        if "top_ids" not in part.tokens.values:
            raise RunError(
                "the output 'top_logprobs' needs the column 'top_ids', which the batch lacks",
                hints=["set sampling.top_logprobs, so that the inference engine reports the likeliest tokens"],
            )
        return torch.cat([part["targets"][:, None], part["top_ids"].to(part["targets"].dtype)], 1)

    def _check_outputs(self, outputs: Sequence[str], *, narrow: bool = False) -> None:
        check_outputs(outputs, self._role, self._ready().model.config.get_text_config().vocab_size, narrow=narrow)

    def _ready(self) -> RoleModule:
        if self._module is None:
            raise RunError("the engine has no model: call setup first, and nothing after close")
        return self._module
