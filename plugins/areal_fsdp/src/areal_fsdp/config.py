"""Settings of the FSDP engine. Imports no torch, so that configs can be checked without it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from areal_core.config import LocalPath, Selection, Settings, component, roles_of
from areal_core.errors import RunError
from areal_fsdp.kinds import OPTIMIZERS
from areal_fsdp.lora.settings import LoraSettings  # noqa: TC001 - pydantic reads annotations
from areal_fsdp.models.schedule import LearningSettings
from areal_fsdp.optimizer_settings import FSDPOptimizerSettings
from areal_fsdp.parallel.settings import ParallelSettings
from areal_fsdp.planning.decoder import Decoder
from areal_fsdp.planning.estimate import estimate
from areal_fsdp.planning.memory import MemoryChoices, memory_of, most_tokens, remedies
from areal_fsdp.planning.meter import GIB
from areal_fsdp.planning.recomputing import Checkpointing, Recomputing

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.engines import Estimate, StoredModel
    from areal_core.sdk import Role
    from areal_fsdp.planning.memory import Memory, RankLoad


def _from_bool(value: object) -> object:
    """Convert a boolean, which the setting accepts for `full` and `none`."""
    return {True: "full", False: "none"}[value] if isinstance(value, bool) else value


class ProfileSettings(Settings):
    """Updates to profile, kernel by kernel."""

    updates: list[Annotated[int, Field(ge=1)]] = Field(
        description="Updates to profile, by their number in this process, from 1. A resumed run counts from 1 again."
    )
    folder: LocalPath = Field(
        description="Folder for the traces, relative to the config. Each rank writes "
        "ROLE-rankR-updateN-PROCESS.json.gz, which ui.perfetto.dev opens."
    )

    @property
    def blocking_file(self) -> Path | None:
        """A file at the path of the folder or of one of its parents; None if there is none."""
        return next((path for path in (self.folder, *self.folder.parents) if path.is_file()), None)


class FSDPConfig(LearningSettings):
    """Optimizer, memory and batching of one training engine."""

    replays_routed_experts: ClassVar[bool] = True
    """Read by the check of `inference_engine.routed_experts`."""
    parallel: ParallelSettings = Field(
        default_factory=lambda: ParallelSettings.model_validate({}),
        description="How ranks divide the work. By default they are data-parallel: each rank has sequences of its own.",
    )
    adapter: LoraSettings | None = Field(
        None, description="LoRA adapter to train; the base model stays frozen. null: train all parameters."
    )
    activation_checkpointing: Annotated[Checkpointing | None, BeforeValidator(_from_bool)] = Field(
        None,
        description="Activations that are recomputed in the backward pass to save memory. `none`: none. "
        "`selective`: all except matrix products and attention, and whole layers as far as activation_memory_gib "
        "requires. `full`: everything except each layer's input (if compiled, also except the result of attention). "
        "null: `selective` if layers are compiled, because it then costs no time, otherwise `none`. false and true "
        "mean `none` and `full`.",
    )
    activation_memory_gib: float | None = Field(
        None,
        gt=0,
        le=1 << 20,
        description="For `selective`: memory budget in GiB for the activations that all layers of a rank keep of "
        "max_tokens_per_microbatch tokens. As little as possible is recomputed within it. null: no whole layer is "
        "recomputed.",
    )
    compile: bool | None = Field(
        None,
        description="Compile the layers and the head with torch.compile. null: yes on a GPU, no on a CPU or with "
        "parallel.expert.",
    )
    attention_kernel: Literal["auto", "flash4", "cudnn", "torch"] = Field(
        "auto",
        description="Attention kernel for half precision on a GPU. `auto`: the fastest kernel that is installed and "
        "passes a test.",
    )
    router_loss: float = Field(
        0.0,
        ge=0,
        description="For MoE models: weight of the load-balancing loss, which keeps experts evenly used (Switch "
        "Transformer), such as 0.01. 0: none.",
    )
    profile: ProfileSettings | None = Field(
        None,
        description="Write traces of some updates with PyTorch's profiler, which slows these updates down. null: none.",
    )
    offload_parameters: bool = Field(
        False, description="Keep parameters, gradients and optimizer state in host memory. GPUs only."
    )
    optimizer: Selection | None = component(
        OPTIMIZERS,
        description="Optimizer, such as `fsdp/muon`. It gets learning_rate, and weight_decay, betas and epsilon as far "
        "as it has these. null: AdamW, with the two settings below.",
    )
    optimizer_state_dtype: Literal["float32", "bfloat16"] = Field(
        "float32",
        description="Number format of AdamW's two moments. `bfloat16` halves their memory: updates are computed in "
        "float32 and stored with stochastic rounding, so that small changes count on average.",
    )
    offload_optimizer: bool = Field(
        False,
        description="Keep AdamW's moments in host memory; an update copies them to the GPU piece by piece. GPUs only.",
    )

    @model_validator(mode="after")
    def _refuse_budget_without_selective(self) -> FSDPConfig:
        if self.activation_memory_gib is not None and self.activation_checkpointing != "selective":
            raise ValueError(
                "activation_memory_gib needs activation_checkpointing: selective, but that is "
                f"{self.activation_checkpointing or 'null'}: leave the budget out (null), or set selective"
            )
        return self

    @property
    def compiles(self) -> bool | None:
        """The setting `compile`, or False with expert parallelism; None for the device's default."""
        return False if self.parallel.expert > 1 else self.compile

    def check(self, config: RunConfig) -> Iterable[str]:
        """Yield problems of the settings that are known before the start."""
        yield from super().check(config)
        if problem := self.parallel.problem(config.trainer_processes):
            yield problem
        if self.adapter is not None:
            yield from self.adapter.problems(config)
            if self.parallel.tensor > 1:
                yield (
                    f"parallel.tensor is {self.parallel.tensor}, but matrices with an adapter cannot be divided: set "
                    "it to 1; context parallelism and more ranks work with an adapter"
                )
        yield from self._problems_of_optimizer()
        if self.router_loss and self.parallel.context > 1:
            yield (
                f"router_loss needs whole sequences, but parallel.context is {self.parallel.context}: set it to 0, or "
                "context to 1"
            )
        if self.compile and self.parallel.expert > 1:
            yield "compile: layers whose tokens go to other ranks (parallel.expert) cannot be compiled: leave it out"
        if self.profile is not None and (path := self.profile.blocking_file):
            yield f"profile.folder: {path} is a file, but traces need a folder there: name another one"

    def _problems_of_optimizer(self) -> Iterable[str]:
        """Yield settings that only the engine's own AdamW has."""
        if self.optimizer is None:
            return
        for key in ("offload_parameters", "offload_optimizer"):
            if getattr(self, key):
                yield f"{key} works only with the engine's own AdamW: set it to false, or optimizer to null"
        if self.optimizer_state_dtype != "float32":
            yield "optimizer_state_dtype is for the engine's own AdamW: leave it out, or set optimizer to null"
        if self.parallel.tensor > 1:
            yield (
                f"parallel.tensor is {self.parallel.tensor}, but {self.optimizer.title} needs matrices that are "
                "divided by rows: set it to 1, or optimizer to null"
            )

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Yield problems of the settings with a model, such as an adapter that the model has merged already."""
        yield from super().check_model(config, model)
        if self.adapter is not None:
            yield from self.adapter.check_model(config, model)

    def adapter_of(self, role: Role) -> LoraSettings | None:
        """Return the adapter of a role's model, or None.

        A role whose model changes gets the adapter. A frozen role gets it only if the adapter starts from a folder,
        because then the initial policy has it too.

        Raises:
            RunError: the role is a moving average: the average of two adapters is not an adapter of their rank.
        """
        if self.adapter is not None and role.ema is not None and role.ema.decay:
            raise RunError(
                f"the role '{role.name}' is a moving average of '{role.ema.role}', but the average of two adapters "
                "is not an adapter of their rank: an adapter can be copied, not averaged",
                hints=["set decay to 0, or train all parameters: train_engine.adapter=null"],
            )
        return self.adapter if role.changes or (self.adapter and self.adapter.from_folder) else None

    @property
    def tokens_at_once(self) -> int:
        """Tokens of a micro-batch on all ranks that share its sequences."""
        return self.max_tokens_per_microbatch * self.parallel.context

    @property
    def _state_bytes(self) -> tuple[float, float] | None:
        """Bytes of optimizer state for an element of a layer and for another one; None for the engine's own AdamW."""
        if self.optimizer is None:
            return None
        settings = self.optimizer.settings
        known = settings if isinstance(settings, FSDPOptimizerSettings) else FSDPOptimizerSettings
        return known.layer_bytes, known.other_bytes

    @property
    def memory_choices(self) -> MemoryChoices:
        """The settings that determine a rank's memory."""
        gib = self.activation_memory_gib
        return MemoryChoices(
            budget=self.max_tokens_per_microbatch,
            compiles=self.compiles,
            checkpointing=self.activation_checkpointing,
            activations=None if gib is None else int(gib * GIB),
            chunk=self.logprob_chunk_tokens,
            offloads=self.offload_parameters,
            half_moments=self.optimizer_state_dtype == "bfloat16",
            offloads_moments=self.offload_optimizer,
            state_bytes=self._state_bytes,
        )

    def recomputing(
        self, model: Decoder | None, role: Role, layers: int, dtype: str, *, is_compiled: bool
    ) -> Recomputing:
        """Return the activation checkpointing of a role; see `MemoryChoices.recomputing`. Frozen roles have none."""
        part = None if model is None else model.divided(self.parallel.tensor)
        recomputing = self.memory_choices.recomputing(part, layers, dtype, is_compiled=is_compiled)
        return recomputing if role.trains else Recomputing()

    def estimate(self, config: RunConfig, models: Mapping[str, StoredModel]) -> Estimate:
        """Estimate the memory of each rank and the size of checkpoints, for all roles with this engine."""
        chosen = {name: config.roles.get(name, config.train_engine).settings for name in models}
        engines = {name: settings for name, settings in chosen.items() if isinstance(settings, FSDPConfig)}
        roles = roles_of(config.algorithm, config.training.updates)
        sizes = [settings.checkpoint_bytes(roles[name], models[name]) for name, settings in engines.items()]
        return replace(estimate(config, models, engines), checkpoint_bytes=sum(sizes))

    def checkpoint_bytes(self, role: Role, model: StoredModel) -> int:
        """Return the bytes of a role's part of a checkpoint: trained parameters and the optimizer's moments."""
        if not role.changes:
            return 0
        adapter = self.adapter_of(role)
        decoder = Decoder.of(model.description, model.shapes, scalar=role.head == "scalar")
        whole = decoder.parameters if decoder is not None else sum(map(math.prod, model.shapes.values()))
        count = whole if adapter is None else adapter.parameters(model.shapes)
        if not role.trains:
            return 4 * count  # parameters that change are stored in float32
        if self._state_bytes is None:
            return count * (4 + 2 * (2 if self.optimizer_state_dtype == "bfloat16" else 4))
        outside = 0 if adapter is not None else count if decoder is None else decoder.root_parameters
        of_layer, of_other = self._state_bytes
        return round(4 * count + of_layer * (count - outside) + of_other * outside)

    def memory(self, load: RankLoad) -> Memory | None:
        """Return the peak memory of a rank in a role; None for a model with unknown layers."""
        adapter = self.adapter_of(load.role)
        learning = None if adapter is None else adapter.parameters(load.shapes)
        memory = memory_of(load, self.parallel, replace(self.memory_choices, learning=learning))
        if memory and adapter is not None and learning is not None and load.role.trains:
            description = f"an adapter of rank {adapter.resolved().rank} learns, {learning:,} parameters"
            memory = replace(memory, learning=description)
        # With a new adapter, the reference is the policy's base model, which is in memory already.
        is_base = self.adapter is not None and adapter is None and load.role.head == "vocabulary"
        return replace(memory, parameters=0, resident=0) if memory and is_base else memory

    def remedies(self, load: RankLoad, room: int) -> list[str]:
        """Return changes of these settings that bring a rank below `room` bytes; see `planning.memory.remedies`."""

        def need(**changes: object) -> Memory | None:
            return self.model_copy(update=changes).memory(load)

        part = replace(load, longest=-(-load.longest // self.parallel.context))
        return remedies(need, part, room, self.memory_choices)

    def longest_sequence(self, load: RankLoad, room: int) -> int:
        """Return the tokens of the longest sequence that fits `room` bytes on each rank that shares it."""

        def need(**changes: object) -> Memory | None:
            return self.model_copy(update=changes).memory(replace(load, tokens=None))

        return most_tokens(need, room) * self.parallel.context
