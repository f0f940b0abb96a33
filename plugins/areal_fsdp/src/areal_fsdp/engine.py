"""The FSDP training engine: one model in one role, on every rank of the trainer."""

from __future__ import annotations

import math
from contextlib import nullcontext
from copy import copy
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule

from areal_core.data import Metric
from areal_core.errors import RunError
from areal_fsdp import checkpoint
from areal_fsdp.loaded import learning, load_role
from areal_fsdp.masters import Masters
from areal_fsdp.models.compiling import prepare_layers, should_compile
from areal_fsdp.models.export import rehearse_export, write_model
from areal_fsdp.models.precision import kept_in_float32, round_frozen
from areal_fsdp.models.probe import choose_rung, expected_before_division
from areal_fsdp.models.wide import compared_roles, is_wide
from areal_fsdp.optimizer import make_optimizers, reset_state, set_hyperparameters, set_rate, step
from areal_fsdp.parallel.gradients import gradient_norm, sum_gradients
from areal_fsdp.parallel.mesh import place_ranks
from areal_fsdp.parallel.ranks import join_group_of_one, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers
from areal_fsdp.profiling import meter_of, profiled
from areal_fsdp.role_engine import RoleEngine, means
from areal_fsdp.sharding import choose_attention, full_parameters, shape_of, shard, synced_parameters, whole_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch.distributed.device_mesh import DeviceMesh

    from areal_core.data import PackedBatch
    from areal_core.engines import AdamWSettings, ModelReference, OptimizerSettings, TrainEngine
    from areal_core.sdk import LossSpec, Role
    from areal_fsdp.attention.hugging_face import Layout
    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.lora.adapter import Adapter
    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.models.probe import Choice
    from areal_fsdp.models.wide import Head
    from areal_fsdp.parallel.loading import ModelFiles
    from areal_fsdp.planning.split import Split
    from areal_vision.places import Seen


class FSDPEngine(RoleEngine):
    """Trains a Hugging Face causal model, or runs it frozen, on all ranks of `torch.distributed`.

    See `areal_core.engines.TrainEngine` for the contract of each method.

    Args:
        settings: the engine's section of the config.
    """

    _config: FSDPConfig

    def __init__(self, settings: FSDPConfig) -> None:
        super().__init__(settings)
        self._adapter: Adapter | None = None
        self._masters: Masters | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._partial: list[tuple[torch.nn.Parameter, DeviceMesh]] = []
        self._choice: Choice | None = None
        self._update_number = 0  # counts the updates of this process, for the profiler
        self._others: Mapping[str, TrainEngine] = {}
        self._snapshot: dict[str, Any] | None = None

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load, shard and check the model, and make the optimizer of a role that learns; collective."""
        self._begin(model, role, settings)
        is_compiled = should_compile(self._config.compiles, self._device)
        if problem := self._config.parallel.problem(rank_and_ranks()[1]):
            raise RunError(problem)
        module, self._adapter, files, self._decoder, self._routing = load_role(
            model,
            role,
            settings,
            self._config,
            compiled=is_compiled,
            has_kernels=self._has_kernels(),
            in_parts=self._must_shard(),
        )
        if self._must_shard():
            join_group_of_one(self._device)
            self._ranks = place_ranks(self._config.parallel, self._device)
        text = module.model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None)
        kernel = choose_attention(text, self._config, self._device, has_kernels=self._has_kernels())
        module.kernel = kernel or module.kernel
        layers = len(decoder_layers(module.model))
        recomputing = self._config.recomputing(self._decoder, role, layers, model.dtype, is_compiled=is_compiled)
        divides = self._ranks.tensor is not None or self._ranks.experts is not None
        expected = expected_before_division(module, files) if divides else None
        self._parameters = self._place(module, files)
        self._module = module
        self._meter = meter_of(self._decoder, self._device, self._dtype, self._parameters if self._adapter else None)
        only_packed = self._config.parallel.needs_packing
        with nullcontext() if self._adapter is None else self._adapter.must_be_called():
            self._choice = choose_rung(module, self._device, self._dtype, expected, only_packed=only_packed)
        self._reshard()
        compiles = is_compiled and not module.in_rows
        prepare_layers(module.model, compile_them=compiles, recomputing=recomputing, in_parts=module.layers_in_parts)
        if settings.is_exported:
            rehearse_export(module.model, model, self._adapter and self._adapter.config)
        if role.trains:
            self._optimizers = make_optimizers(self._parameters, self._config, is_compiled=is_compiled)

    def compare_with(self, engines: Mapping[str, TrainEngine]) -> None:
        """See `ComparingEngine`."""
        self._others = engines

    def _has_kernels(self) -> bool:
        return self._device.type == "cuda" and self._dtype != torch.float32

    def _place(self, module: RoleModule, files: ModelFiles | None) -> dict[str, torch.nn.Parameter]:
        """Move the model to the device, sharded if there is anything to shard; return the trained parameters."""
        round_frozen(module.model, self._dtype)
        if self._ranks.shards is not None:
            self._partial = shard(module, self._ranks, self._config, self._dtype, files)
        elif self._dtype != torch.float32 and self._role.changes:
            fused = module.compiled and not self._config.offload_optimizer and self._config.optimizer is None
            learns = learning(module, self._adapter)
            kept = kept_in_float32(module.model, self._dtype)
            self._masters = Masters(module.model, learns, self._dtype, self._device, kept=kept, is_compiled=fused)
            return self._masters.parameters
        else:
            module.to(self._device)
        return learning(module, self._adapter)

    def _applied(self) -> AbstractContextManager[None]:
        """Enable or disable the adapter inside this context: a reference from the base shares the actor's model."""
        return nullcontext() if self._adapter is None else self._adapter.applied()

    def _must_shard(self) -> bool:
        """Return True if the engine uses `fully_shard`: with several ranks, or to offload parameters.

        On one rank its hooks and copies cost 9% of a train step (88 ms instead of 80, benchmarks/train_step.py).
        """
        return rank_and_ranks()[1] > 1 or (self._config.offload_parameters and self._device.type != "cpu")

    def _train(self, planned: Sequence[tuple[LossSpec, Split]], rate: float) -> dict[str, Metric]:
        self._update_number += 1
        self._tokens = sum(work.batch.token_count for work, _ in planned)
        if self._masters is not None:
            self._masters.expect(sum(split.rounds for _, split in planned))
        with profiled(self._config.profile, self._update_number, f"{self._role.name}-rank{rank_and_ranks()[0]}"):
            return {**super()._train(planned, rate), **self._routing.metrics()}

    def _expect(self, part: PackedBatch, place: tuple[Any, ...], *, counts: bool, is_last: bool) -> None:
        if isinstance(self._module, FSDPModule):  # replicas sum gradients once per update, shards after each pass
            self._module.set_requires_all_reduce(is_last)
        self._routing.watch(part.lengths, place[0], self._tokens, self._ready().context, counts=counts)

    def _backward(self, found: Mapping[str, torch.Tensor], loss: torch.Tensor | None, outputs: Sequence[str]) -> None:
        # FSDP's collectives wait until every rank has run the backward pass of every layer and head that any rank used.
        # So outputs that the loss does not use get a gradient of zeros. The outputs of the head share one graph, so
        # that a single output reaches all of it. Wide outputs have separate graphs.
        losses, wide = [] if loss is None else [loss], any(map(is_wide, outputs))
        if not losses or wide:
            roots = [value for value in found.values() if value.requires_grad][: None if wide else 1]
            torch.autograd.backward([*losses, *roots], [*(None for _ in losses), *map(torch.zeros_like, roots)])
        else:
            torch.autograd.backward(losses)

    def _finish(self, outputs: Sequence[Sequence[str]]) -> None:
        self._routing.rest()
        for names in outputs:
            self._reshard(names)
        sum_gradients(self._partial)

    @torch.no_grad()
    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """Move this engine's weights towards those of another engine; see `TrainEngine.update_ema`."""
        if not isinstance(source, FSDPEngine) or source._parameters.keys() != self._parameters.keys():
            raise RunError(
                f"the source of an EMA must be an fsdp engine with the same parameters, not {type(source).__name__}"
            )
        self._needs_layout_of(source, "are EMA and source")
        for name, parameter in self._parameters.items():
            parameter.lerp_(source._parameters[name].detach(), 1 - decay)
        if self._masters is not None:
            self._masters.sync()

    def _update(self, rate: float) -> dict[str, Metric]:
        set_rate(self._optimizers, rate)
        norm = gradient_norm(self._gradients(), self._ranks)
        step(self._optimizers, norm, self._config.max_gradient_norm, self._masters)
        value = float(norm)
        skipped = Metric.sum(float(not math.isfinite(value)))
        return {**means(gradient_norm=value, learning_rate=rate), "skipped": skipped}

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients that exist, in the order of the parameters."""
        if self._masters is not None:
            return self._masters.gradients()
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def _read_by(self, outputs: Sequence[str]) -> list[RoleEngine]:
        return [self, *map(self._other, compared_roles(outputs))]

    def _rounds(self, batch: PackedBatch, split: Split) -> list[tuple[PackedBatch, tuple[Any, ...], bool]]:
        self._routing.check(batch, self._role)
        return super()._rounds(batch, split)

    def _compute(self, part: PackedBatch, place: tuple[Any, ...], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        ids, (layout, seen) = part["input_ids"], place
        with torch.no_grad():
            others = {role: self._other(role)._head_state(ids, *place) for role in compared_roles(outputs)}
        # Set for each pass: a reference from the base shares the routers, but does not replay.
        self._routing.replay(part, self._role, layout, self._ready().context)
        with self._applied():
            return self._ready()(ids, layout, self._targets(part, outputs), outputs, others, seen)

    def _head_state(self, ids: torch.Tensor, layout: Layout, seen: Seen | None) -> Head:
        module = self._ready()
        if layout.in_rows != module.in_rows:  # the layout was made for the model that is compared with this one
            layout = module.layout(layout.lengths, self._device)
        self._routing.replay(None, self._role, layout, module.context)
        with self._applied():
            return module.head_state(ids, layout, seen)

    def _other(self, role: str) -> FSDPEngine:
        """Return the engine of a role that this engine is compared with."""
        other = self._others.get(role)
        if not isinstance(other, FSDPEngine) or other is self or other._role.head != "vocabulary":
            raise RunError(
                f"an output compares the role '{self._role.name}' with the role '{role}', which has no fsdp engine of "
                "its own with a vocabulary head",
                hints=[f"the algorithm must need the role '{role}', and that role must use the engine fsdp/fsdp"],
            )
        self._needs_layout_of(other, "are compared")
        return other

    def _needs_layout_of(self, other: FSDPEngine, why: str) -> None:
        """Raise RunError if a rank has other tokens or parameters in the other engine."""
        roles = f"the roles '{self._role.name}' and '{other._role.name}'"
        self._config.parallel.require_same_layout(other._config.parallel, f"{roles} {why}")

    def _reshard(self, outputs: Sequence[str] = ()) -> None:
        """Free the gathered parameters of the root, which FSDP keeps after a forward pass for the backward pass.

        Also free those of the engines that these outputs compare with: they never run a backward pass.
        """
        if isinstance(self._module, FSDPModule):
            self._module.reshard()
        for role in compared_roles(outputs):
            self._other(role)._reshard()

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a weight sync; see `synced_parameters`; collective."""
        return synced_parameters(self._ready().model, self._adapter, self._whole)

    def named_meta_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensors of the same names, shapes and dtypes on the meta device; see `TrainEngine`; not collective."""
        return synced_parameters(self._ready().model, self._adapter, partial(shape_of, dtype=self._dtype))

    def _whole(self, parameter: torch.Tensor) -> torch.Tensor:
        return whole_of(parameter, self._device, self._dtype)

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective."""
        checkpoint.writer_of(self._state())(folder)

    def snapshot_size(self) -> int:
        """See `SnapshotEngine`. The first snapshot's memory is reused by all later ones."""
        return checkpoint.size_of(self._state()) if self._snapshot is None else 0

    @torch.no_grad()
    def snapshot(self) -> Callable[[Path], None]:
        """See `SnapshotEngine`."""
        self._snapshot = checkpoint.copy_to_host(self._state(), self._snapshot)
        return checkpoint.writer_of(self._snapshot)

    def _state(self) -> dict[str, Any]:
        self._ready()
        join_group_of_one(self._device)
        return checkpoint.checkpoint_state(self._parameters, self._optimizers, self._updates)

    def set_optimizer(self, settings: AdamWSettings) -> None:
        """See `SteerableEngine`."""
        self._require_adamw()
        update = asdict(settings) | {"warmup_steps": 0, "schedule": "constant"}
        self._config = self._config.model_copy(update=update)
        set_hyperparameters(self._optimizers, self._config)

    def reset_optimizer(self) -> None:
        """See `SteerableEngine`."""
        self._require_adamw()
        reset_state(self._optimizers)

    def _require_adamw(self) -> None:
        if self._config.optimizer is not None:
            raise RunError(
                f"the optimizer is {self._config.optimizer.title}, and only AdamW can be set from outside",
                hints=["remove train_engine.optimizer"],
            )

    def load(self, folder: Path) -> None:
        """Restore a checkpoint; collective."""
        checkpoint.read_checkpoint(folder, self._state())
        if self._masters is not None:
            self._masters.sync()

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder; collective."""
        parameters = full_parameters(self._ready().model, self._adapter, self._whole)
        write_model(folder, self._ready().model, self._reference, parameters)
        if self._adapter is not None:
            in_float32 = partial(whole_of, device=self._device, dtype=torch.float32)
            self._adapter.export(folder / "adapter", self._parameters, in_float32)

    @property
    def begins_elsewhere(self) -> bool:
        """See `AdapterEngine`."""
        return self._adapter is not None and self._adapter.begins_elsewhere

    def reference_from_base(self, model: ModelReference, role: Role) -> TrainEngine | None:
        """See `AdapterEngine`."""
        is_base = model == self._reference and role.head == self._role.head and not role.changes
        if self._adapter is None or self.begins_elsewhere or not is_base:
            return None
        base = copy(self)
        base._role, base._adapter, base._parameters = role, self._adapter.without(), {}
        base._optimizers, base._masters, base._snapshot = [], None, None
        base._meter = meter_of(self._decoder, self._device, self._dtype)
        return base

    def close(self) -> None:
        """Free model and optimizer; safe to call twice."""
        self._module = self._adapter = self._masters = self._snapshot = None
        self._parameters, self._partial, self._optimizers = {}, [], []
