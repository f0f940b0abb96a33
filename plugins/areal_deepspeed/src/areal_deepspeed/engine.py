"""The training engine: one model in one role, on every rank of the trainer."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.data import Metric, PackedBatch, Ragged, combine, reduce_over_ranks
from areal_core.errors import RunError
from areal_deepspeed.checkpoint import Checkpoint
from areal_deepspeed.refusals import no_images, refusals
from areal_deepspeed.zero import deepspeed, initialize, make_optimizer
from areal_fsdp.attention.kernels import choose_kernel
from areal_fsdp.models.compiling import prepare_layers
from areal_fsdp.models.export import write_model
from areal_fsdp.models.metrics import means
from areal_fsdp.models.model import RoleModule, decoder_of, load_model
from areal_fsdp.models.probe import check_module
from areal_fsdp.models.schedule import learning_rate_at
from areal_fsdp.models.wide import check_outputs, compared_roles
from areal_fsdp.parallel.file_names import named_as_in_files
from areal_fsdp.parallel.ranks import join_group_of_one, own_device, rank_and_ranks
from areal_fsdp.planning.meter import Meter, peak_flops
from areal_fsdp.planning.recomputing import Recomputing
from areal_fsdp.planning.split import Split
from areal_vision.places import is_vision_config

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces import LossSpec, ModelReference, OptimizerSettings, Role, TrainEngine
    from areal_deepspeed.config import DeepSpeedConfig
    from areal_fsdp.attention.hugging_face import Layout


class DeepSpeedEngine:
    """Trains a Hugging Face causal model by ZeRO 2 or 3, or serves it frozen, on all ranks of `torch.distributed`.

    See `areal_core.interfaces.TrainEngine` for what each method promises.

    Args:
        settings: the engine's section of the config.
    """

    def __init__(self, settings: DeepSpeedConfig) -> None:
        self._config = settings
        self._device = torch.device("cpu")
        self._module: RoleModule | None = None
        self._zero: Any = None
        self._average: dict[str, torch.Tensor] = {}
        self._updates = 0
        self._meter = Meter(None, 1)

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load and check the model, and give it to ZeRO where it learns, or where stage 3 divides it."""
        self._device = own_device()
        os.environ.setdefault("LOCAL_RANK", "0")
        self._reference, self._role, self._run = model, role, settings
        self._dtype = getattr(torch, model.dtype)
        self._read_document(model.dtype)
        deepspeed()
        join_group_of_one(self._device)
        module = self._load(model, role, settings.temperature)
        text = module.model.config.get_text_config()
        self._longest = getattr(text, "max_position_embeddings", None)
        is_fast = self._device.type == "cuda" and self._dtype == torch.bfloat16
        peak = peak_flops(torch.cuda.get_device_name(self._device)) if is_fast else None
        self._meter = Meter(decoder_of(module.model, role), rank_and_ranks()[1], peak)
        is_divided = self._document.stage == 3 and (role.trains or not role.changes)
        self._check(module if is_divided else module.to(self._device))
        if role.trains or is_divided:
            self._divide(module, text.hidden_size)
        elif role.changes and self._dtype != torch.float32:  # an average moves by less than bfloat16 can tell
            self._average = {name: p.detach().clone() for name, p in module.model.named_parameters()}
            module.to(self._dtype)
        elif role.changes:
            self._average = {name: p.detach() for name, p in module.model.named_parameters()}
        module.eval()
        self._module = module

    def _check(self, module: RoleModule) -> None:
        """Compare with transformers where the module is, before ZeRO has it: on the CPU where it shall be divided."""
        parameter = next(module.parameters())
        for_graphs, module.for_graphs = module.for_graphs, module.for_graphs and parameter.is_cuda
        check_module(module, parameter.device, parameter.dtype)
        module.for_graphs = for_graphs

    def _read_document(self, dtype: str) -> None:
        try:
            self._document = self._config.document()
        except ValueError as error:
            raise RunError(str(error)) from error
        if problems := list(refusals(self._document, dtype)):
            raise RunError(problems[0], hints=problems[1:])

    def _load(self, model: ModelReference, role: Role, temperature: float) -> RoleModule:
        loaded, _ = load_model(model, role)
        if is_vision_config(loaded.config):
            raise RunError(no_images(loaded.config.model_type))
        has_kernels = self._device.type == "cuda" and self._dtype != torch.float32
        text = loaded.config.get_text_config()
        if has_kernels:
            heads = text.num_attention_heads
            head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
            key_heads = getattr(text, "num_key_value_heads", None) or heads
            choose_kernel("auto", heads, key_heads, head_size, self._device)
        again = text.num_hidden_layers if role.trains and self._config.activation_checkpointing else 0
        prepare_layers(loaded, compile_them=False, recomputing=Recomputing(whole=again))
        chunk = self._config.logprob_chunk_tokens
        return RoleModule(loaded, role, temperature=temperature, chunk_tokens=chunk, for_graphs=has_kernels)

    def _divide(self, module: RoleModule, hidden_size: int) -> None:
        """Give the module to DeepSpeed; collective."""
        config = self._document.filled(
            dtype=self._reference.dtype,
            hidden_size=hidden_size,
            total_updates=self._run.total_updates,
            trains=self._role.trains,
        )
        optimizer, is_first = None, rank_and_ranks()[0] == 0
        if is_first and (told := self._document.became(config)):
            sys.stderr.write(f'deepspeed, {self._role.name}: what was "auto" is {told}\n')
        if self._role.trains:
            decay = self._document.value("optimizer.params.weight_decay")
            optimizer = make_optimizer(module.parameters(), decay, self._document.optimizer_settings())
        self._zero = initialize(module, config, optimizer)

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Values of the whole batch, on every rank, in its order; float32 [sum(T)] on the CPU."""
        self._check_outputs(outputs, narrow=True)
        began, result = time.perf_counter(), torch.zeros(len(outputs), batch.token_count)
        if not len(batch):
            return dict(zip(outputs, result, strict=True))
        needed = {"input_ids": batch["input_ids"], "targets": batch["targets"], "place": torch.arange(result.shape[1])}
        slim = PackedBatch(Ragged(batch.lengths, needed))
        with torch.no_grad():
            for part, layout, counts in self._rounds(slim, self._plan(batch)):
                computed = self._compute(part, layout, outputs)
                if counts:
                    values = torch.stack([computed[name] for name in outputs])
                    result[:, part["place"].cpu()] = values.cpu()
        if rank_and_ranks()[1] > 1:
            dist.all_reduce(result)  # each token is on one rank and 0 on the others
        self._meter.passed(time.perf_counter() - began)
        return dict(zip(outputs, result, strict=True))

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """One optimizer update on the sum of all losses; empty batches change nothing."""
        if not self._role.trains:
            raise RunError(f"an engine in the role '{self._role.name}' is frozen and cannot be trained")
        for work in works:
            self._check_outputs(work.outputs)
        if not self._document.has_scheduler:
            rate = learning_rate_at(self._updates, self._schedule, self._run.total_updates)
            for group in self._zero.optimizer.param_groups:
                group["lr"] = rate
        rate = float(self._zero.optimizer.param_groups[0]["lr"])
        planned = [(work, self._plan(work.batch)) for work in works if len(work.batch)]
        left = sum(split.rounds for _, split in planned)
        if not left:
            return {**means(loss=0.0, gradient_norm=0.0, learning_rate=rate), "skipped": Metric.sum(0.0)}
        began = time.perf_counter()
        parts: list[Mapping[str, Metric]] = []
        for work, split in planned:
            for part, layout, counts in self._rounds(work.batch, split):
                left -= 1
                self._zero.set_gradient_accumulation_boundary(left == 0)
                parts += self._backward(work, part, layout, counts=counts)
        update = self._update(rate)
        metrics = reduce_over_ranks(combine(parts))
        done = [(work.batch.lengths.tolist(), split) for work, split in planned]
        self._meter.trained(time.perf_counter() - began, done, 0.0)
        return {**metrics, **means(loss=float(metrics["loss"].values)), **update}

    def _backward(
        self, work: LossSpec, part: PackedBatch, layout: Layout, *, counts: bool
    ) -> list[Mapping[str, Metric]]:
        """The gradient of one micro-batch, and its metrics; none of one that only keeps other ranks company."""
        computed = self._compute(part, layout, work.outputs)
        result = work.loss(part, computed) if counts else None
        # ZeRO 3's collectives wait for every rank's backward pass, and follow the outputs through which it comes: so
        # all go through all, whatever a loss has read of them and whether the micro-batch counts.
        total: Any = sum(value.sum() * 0 for value in computed.values() if value.requires_grad)
        if result is not None and result.loss.requires_grad:
            total = total + result.loss
        # DeepSpeed divides by the ranks: it means an average, and losses here are parts of one sum.
        self._zero.backward(total * rank_and_ranks()[1])
        return [] if result is None else [{**result.metrics, "loss": Metric.sum(result.loss)}]

    def _update(self, rate: float) -> dict[str, Metric]:
        """Clip and apply the gradients, unless they are not finite."""
        self._zero.step()
        skipped = bool(self._zero.optimizer.overflow)
        norm = float("nan") if skipped else float(self._zero.get_global_grad_norm())
        self._updates += not skipped and norm > 0
        return {**means(gradient_norm=norm, learning_rate=rate), "skipped": Metric.sum(float(skipped))}

    @property
    def _schedule(self) -> DeepSpeedConfig:
        """The settings of our schedule, at the rate that the JSON may have set."""
        return self._config.model_copy(update={"learning_rate": self._document.value("optimizer.params.lr")})

    def measurements(self) -> dict[str, float]:
        """See `MeasuringEngine`; without memory, which DeepSpeed's own settings decide."""
        return self._meter.take()

    @torch.no_grad()
    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """Move towards another engine of this kind; see `TrainEngine.update_ema`."""
        if not isinstance(source, DeepSpeedEngine):
            raise RunError(f"the deepspeed engine is an EMA only of one of its own kind, not {type(source).__name__}")
        own = dict(self._ready().model.named_parameters())
        for name, tensor in source._full_masters():
            self._average[name].lerp_(tensor.to(self._device), 1 - decay)
            if own[name].data_ptr() != self._average[name].data_ptr():
                own[name].copy_(self._average[name])

    def _full_masters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole float32 tensor of each parameter that changes; collective."""
        if self._zero is None:
            yield from self._average.items()
            return
        for name, parameter in self._ready().model.named_parameters():
            yield name, deepspeed().utils.safe_get_full_fp32_param(parameter)

    def _plan(self, batch: PackedBatch) -> Split:
        rank, ranks = rank_and_ranks()
        return Split.plan(
            batch.lengths.tolist(),
            batch.unit_rows,
            rank=rank,
            ranks=ranks,
            max_tokens=self._config.max_tokens_per_microbatch,
            longest=self._longest,
        )

    def _rounds(self, batch: PackedBatch, split: Split) -> Iterator[tuple[PackedBatch, Layout, bool]]:
        """This rank's micro-batches on the device, and whether each counts; the same number on every rank."""
        for rows, counts in split.rows_by_round():
            part = batch if len(rows) == len(batch) else batch.select(rows)
            yield part.to(self._device), self._ready().layout(part.lengths, self._device), counts

    def _compute(self, part: PackedBatch, layout: Layout, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        module = self._ready() if self._zero is None else self._zero
        computed: dict[str, torch.Tensor] = module(part["input_ids"], layout, part["targets"], outputs)
        return computed

    def _check_outputs(self, outputs: Sequence[str], *, narrow: bool = False) -> None:
        check_outputs(outputs, self._role, self._ready().model.config.get_text_config().vocab_size, narrow=narrow)
        if roles := sorted(compared_roles(outputs)):
            raise RunError(
                f"the deepspeed engine compares no roles, and a loss asks how far '{self._role.name}' is from "
                f"'{roles[0]}' over the whole vocabulary",
                hints=["take the train engine fsdp/fsdp for this algorithm"],
            )

    def _ready(self) -> RoleModule:
        if self._module is None:
            raise RunError("the engine has no model: call setup first, and nothing after close")
        return self._module

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and whole tensor of each parameter, as in the files, in the dtype that the model was asked for."""
        return named_as_in_files(self._ready().model, self._gathered())

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._ready().model.named_parameters():
            if self._zero is None:
                yield name, parameter.detach().to(self._dtype)
                continue
            with deepspeed().zero.GatheredParameters([parameter]):  # one at a time; of stage 2 they are whole
                whole = parameter.detach().to(self._dtype, copy=True)  # a layer's are put together behind the gathering
            yield name, whole

    def save(self, folder: Path) -> None:
        """Write a checkpoint; collective."""
        self._checkpoint(folder).write(self._zero, self._average, self._updates)

    def load(self, folder: Path) -> None:
        """Restore a checkpoint of as many ranks; collective."""
        self._updates = self._checkpoint(folder).read(self._zero, self._average)
        for name, parameter in self._ready().model.named_parameters():
            if name in self._average:
                parameter.data.copy_(self._average[name])

    def _checkpoint(self, folder: Path) -> Checkpoint:
        self._ready()
        return Checkpoint(folder, stage=int(self._document.section("zero_optimization")["stage"]))

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder; collective."""
        write_model(folder, self._ready().model, self._reference, self.named_full_parameters())

    def close(self) -> None:
        """Free model and optimizer; safe to call twice."""
        if self._zero is not None:
            self._zero.destroy()
        self._module = self._zero = None
        self._average = {}
