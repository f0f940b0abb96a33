"""DeepSpeed training engine: one model in one role, on every rank of the trainer."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import Metric
from areal_core.errors import RunError
from areal_core.models import is_vlm
from areal_deepspeed import checkpoint
from areal_deepspeed.refusals import no_float32, no_images
from areal_deepspeed.zero import deepspeed, initialize
from areal_fsdp.checkpoint import checkpoint_state
from areal_fsdp.config import FSDPConfig
from areal_fsdp.masters import Masters
from areal_fsdp.models.compiling import prepare_layers
from areal_fsdp.models.export import rehearse_export, write_model
from areal_fsdp.models.model import RoleModule, decoder_of, load_model
from areal_fsdp.models.precision import kept_in_float32, round_frozen, stored_buffers
from areal_fsdp.models.probe import choose_rung
from areal_fsdp.models.wide import compared_roles
from areal_fsdp.optimizer import adamw_settings
from areal_fsdp.parallel.file_names import named_as_in_files
from areal_fsdp.parallel.mesh import Ranks
from areal_fsdp.parallel.ranks import join_group_of_one, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers
from areal_fsdp.planning.recomputing import Recomputing
from areal_fsdp.profiling import meter_of
from areal_fsdp.role_engine import RoleEngine, means
from areal_fsdp.sharding import choose_attention

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.engines import ModelReference, OptimizerSettings, TrainEngine
    from areal_core.sdk import Role
    from areal_deepspeed.config import DeepSpeedConfig


class DeepSpeedEngine(RoleEngine):
    """Trains a Hugging Face causal model with ZeRO 2 or 3, or runs it frozen, on all ranks of `torch.distributed`.

    See `areal_core.engines.TrainEngine` for the contract of each method.

    Args:
        settings: the engine's section of the config.
    """

    _config: DeepSpeedConfig

    def __init__(self, settings: DeepSpeedConfig) -> None:
        super().__init__(settings)
        self._zero: Any = None
        self._average: Masters | None = None

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load and check the model. ZeRO wraps it if it is trained, or if stage 3 shards it."""
        os.environ.setdefault("LOCAL_RANK", "0")
        problems = self._config.problems(model.dtype)
        if problems:
            raise RunError(problems[0], hints=problems[1:])
        self._document = self._config.document()
        self._config = self._document.settings
        self._begin(model, role, settings)
        self._document.settings = self._config
        deepspeed()
        join_group_of_one(self._device)
        self._ranks = Ranks(*rank_and_ranks())
        is_divided = self._document.stage == 3 and (role.trains or not role.changes)
        module = self._load(model, role, settings.temperature, is_divided=is_divided)
        self._longest = getattr(module.model.config.get_text_config(), "max_position_embeddings", None)
        self._meter = meter_of(decoder_of(module.model, role), self._device, self._dtype)
        if role.trains or is_divided:
            self._divide(module)
        elif role.changes:
            learning = dict(module.model.named_parameters())
            float32_names = kept_in_float32(module.model, self._dtype)
            self._average = Masters(
                module.model, learning, self._dtype, self._device, kept=float32_names, is_compiled=False
            )
        module.eval()
        self._module = module
        if settings.is_exported:
            rehearse_export(module.model, model)

    def _load(self, model: ModelReference, role: Role, temperature: float, *, is_divided: bool) -> RoleModule:
        """Return the model, compared with transformers before ZeRO wraps it: on the CPU if it will be sharded."""
        loaded, _ = load_model(model, role)
        if is_vlm(loaded.config):
            raise RunError(no_images(loaded.config.model_type))
        kept = kept_in_float32(loaded, self._dtype)
        if kept and (role.trains or is_divided):
            raise RunError(no_float32(loaded.config.model_type, next(iter(kept))))
        round_frozen(loaded, self._dtype)
        has_kernels = self._device.type == "cuda" and self._dtype != torch.float32
        text = loaded.config.get_text_config()
        kernel = choose_attention(text, FSDPConfig.model_validate({}), self._device, has_kernels=has_kernels)
        recomputed = len(decoder_layers(loaded)) if role.trains and self._config.activation_checkpointing else 0
        prepare_layers(loaded, compile_them=False, recomputing=Recomputing(whole=recomputed))
        module = RoleModule(loaded, role, temperature=temperature, chunk_tokens=self._config.logprob_chunk_tokens)
        device = torch.device("cpu") if is_divided else self._device
        module.kernel = "" if is_divided else kernel
        choose_rung(module.to(device), device, next(module.parameters()).dtype)
        module.kernel = kernel
        return module

    def _divide(self, module: RoleModule) -> None:
        """Wrap the module in DeepSpeed's engine; collective."""
        size, trains = module.model.config.get_text_config().hidden_size, self._role.trains
        run: Any = {"dtype": self._reference.dtype, "total_updates": self._run.total_updates, "trains": trains}
        config = self._document.filled(hidden_size=size, **run)
        if rank_and_ranks()[0] == 0:
            shown = {**config, "optimizer": adamw_settings(self._config), "weight_decay": self._config.weight_decay}
            sys.stderr.write(f"deepspeed, {self._role.name}: config {json.dumps(shown)}\n")
        self._zero = initialize(module, config, self._config, trains=trains)

    def _rate(self) -> float:
        return float(self._zero.optimizer.param_groups[0]["lr"]) if self._document.has_scheduler else super()._rate()

    def _expect(self, part: PackedBatch, place: tuple[Any, ...], *, counts: bool, is_last: bool) -> None:
        self._zero.set_gradient_accumulation_boundary(is_last)

    def _backward(self, found: Mapping[str, torch.Tensor], loss: torch.Tensor | None, outputs: Sequence[str]) -> None:
        # ZeRO 3's collectives follow the outputs through which a backward pass goes. So all ranks must go through all
        # outputs, whether or not the loss has read them.
        total: Any = sum(value.sum() * 0 for value in found.values() if value.requires_grad)
        # DeepSpeed divides by the number of ranks for an average; losses here are parts of one sum.
        self._zero.backward((total if loss is None else total + loss) * rank_and_ranks()[1])

    def _update(self, rate: float) -> dict[str, Metric]:
        for group in self._zero.optimizer.param_groups:
            group["lr"] = rate
        self._zero.step()
        skipped = bool(self._zero.optimizer.overflow)
        norm = float("nan") if skipped else float(self._zero.get_global_grad_norm())
        return {**means(gradient_norm=norm, learning_rate=rate), "skipped": Metric.sum(float(skipped))}

    @torch.no_grad()
    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """Move this engine's weights towards those of another engine; see `TrainEngine.update_ema`."""
        if not isinstance(source, DeepSpeedEngine):
            raise RunError(
                f"the deepspeed engine can be an EMA only of a deepspeed engine, not of {type(source).__name__}"
            )
        assert self._average is not None
        for name, parameter in source._ready().model.named_parameters():
            master = deepspeed().utils.safe_get_full_fp32_param(parameter)
            self._average.parameters[name].lerp_(master.to(self._device), 1 - decay)
        self._average.sync()

    def _compute(self, part: PackedBatch, place: tuple[Any, ...], outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        module = self._ready() if self._zero is None else self._zero
        computed: dict[str, torch.Tensor] = module(part["input_ids"], place[0], self._targets(part, outputs), outputs)
        return computed

    def _read_by(self, outputs: Sequence[str]) -> list[RoleEngine]:
        if compared_roles(outputs):
            raise RunError(
                "the deepspeed engine does not compare roles over the whole vocabulary",
                hints=["use the train engine fsdp/fsdp for this algorithm"],
            )
        return [self]

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the whole tensor of each parameter and stored buffer, as in model files."""
        buffers = stored_buffers(self._ready().model).items()
        return named_as_in_files(self._ready().model, chain(self._gathered(), buffers))

    def named_meta_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and meta tensors; see `TrainEngine`. Stage 3 keeps the shape of its parameters in `ds_shape`."""
        named = self._ready().model.named_parameters()
        shapes = ((name, getattr(parameter, "ds_shape", parameter.shape), parameter.dtype) for name, parameter in named)
        empty = ((name, torch.empty(shape, dtype=dtype, device="meta")) for name, shape, dtype in shapes)
        buffers = ((name, buffer.to("meta")) for name, buffer in stored_buffers(self._ready().model).items())
        return named_as_in_files(self._ready().model, chain(empty, buffers))

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._ready().model.named_parameters():
            # One at a time: stage 2's are whole, and the caller assembles those of a layer after the gathering.
            with nullcontext() if self._zero is None else deepspeed().zero.GatheredParameters([parameter]):
                whole = parameter.detach() if self._zero is None else parameter.detach().clone()
            yield name, whole

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective. Raises RunError if the folder cannot be written."""
        checkpoint.write(folder, self._zero, self._state())

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of the same number of ranks; collective."""
        checkpoint.read(folder, self._zero, self._state())
        if self._average is not None:
            self._average.sync()

    def _state(self) -> dict[str, Any]:
        self._ready()
        return checkpoint_state({} if self._average is None else self._average.parameters, (), self._updates)

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder; collective."""
        write_model(folder, self._ready().model, self._reference, self.named_full_parameters())

    def close(self) -> None:
        """Free model and optimizer. May be called twice."""
        if self._zero is not None:
            self._zero.destroy()
        self._module = self._zero = self._average = None
