"""Estimate the memory of each rank of the trainer before a run starts. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from areal_core.config import Settings, roles_of
from areal_core.engines import Estimate
from areal_fsdp.planning.memory import RankLoad
from areal_fsdp.planning.meter import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel
    from areal_fsdp.planning.memory import Memory

MOST_RANKS: Final = 1024
SPARED: Final = 0.1
"""Share of a GPU that proposals leave free: for CUDA, fragmentation, and the estimate's error."""
PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "head")


class PlansMemory(Protocol):
    """Settings of an engine that can estimate its memory."""

    def memory(self, load: RankLoad) -> Memory | None:
        """Return the peak memory of a rank with these settings; None for a model with unknown layers.

        Raises:
            RunError: the engine cannot train this model with these settings.
        """

    def remedies(self, load: RankLoad, room: int) -> list[str]:
        """Return changes that bring a rank below `room` bytes: each `key=value`, or several separated by blanks."""

    def longest_sequence(self, load: RankLoad, room: int) -> int:
        """Return the tokens of the longest sequence that fits `room` bytes; 0 if none fits."""


def estimate(config: RunConfig, models: Mapping[str, StoredModel], engines: Mapping[str, PlansMemory]) -> Estimate:
    """Return the rows about memory of a run's plan, and a problem if the run does not fit.

    Args:
        config: the run's config.
        models: the models, by role.
        engines: the settings of engines that can estimate their memory, by role.

    Raises:
        RunError: an engine cannot train its model with its settings.
    """
    plan = MemoryPlan(config, models, engines, config.placement.gpu_bytes())
    return Estimate(
        list(_rows(config, plan)),
        list(plan.problems()),
        {"memory": plan.as_dict()},
        peak_bytes=plan.peak,
        resident_bytes=plan.resident,
    )


def _rows(config: RunConfig, plan: MemoryPlan) -> Iterator[tuple[str, str]]:
    """Yield name and text of the plan's rows about memory: each role's parts, the sum, and the longest sequences."""
    if not plan.roles:
        yield "memory", "unknown: config.json lacks sizes, or the model sees images"
        return
    for role in plan.roles:
        yield "memory", plan.parts(role)
    if plan.gpu_bytes is None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        available = f"this machine has {machine / GIB:.0f} (set placement.gpu_memory_gib to plan for other GPUs)"
    else:
        available = f"its GPU has {plan.gpu_bytes / GIB:.1f}, of which CUDA uses some"
    yield "", f"{plan.peak / GIB:.1f} GiB for each of {plan.ranks} rank(s) in total; {available}"
    servers = None if config.inference_engine is None else config.inference_engine.settings
    keeps_memory = getattr(servers, "needs_gpu", False) and not config.takes_turns  # time-sharing has a row below
    uncounted = "; the servers on its GPU are not counted" if config.placement.colocated and keeps_memory else ""
    for role, tokens in plan.longest_sequences.items():
        yield "longest", f"{role}: a sequence or micro-batch of {tokens:,} tokens fits with a tenth to spare{uncounted}"
    if config.placement.colocated and plan.gpu_bytes is not None and not keeps_memory:
        held = plan.resident if config.takes_turns else plan.peak
        left = (plan.gpu_bytes - held) / GIB
        yield "colocated", f"the trainer holds {held / GIB:.1f} GiB while servers generate in {left:.1f} GiB"


class MemoryPlan:
    """The memory of a rank of the trainer, for every role whose engine and model are known.

    Args:
        config: the run's config.
        models: the models, by role.
        engines: the engines' settings, by role.
        gpu_bytes: memory of a rank's GPU, None for a CPU.

    Attributes:
        roles: the peak memory of each role alone, by name.
    """

    def __init__(
        self,
        config: RunConfig,
        models: Mapping[str, StoredModel],
        engines: Mapping[str, PlansMemory],
        gpu_bytes: int | None,
    ) -> None:
        self._config, self._models, self._engines = config, models, engines
        self.gpu_bytes = gpu_bytes
        self.ranks = config.trainer_processes
        self.roles = self._of_ranks(self.ranks)

    @property
    def resident(self) -> int:
        """Bytes that a rank keeps between steps."""
        return sum(memory.resident for memory in self.roles.values())

    @property
    def peak(self) -> int:
        """Peak bytes of a rank. One role computes at a time; the others keep their resident memory."""
        return _peak(self.roles)

    def problems(self) -> Iterator[str]:
        """Yield a problem, with changes of settings that would fit, if a rank needs more than its GPU has."""
        if self.gpu_bytes is None or self.peak <= self.gpu_bytes:
            return
        name = max(self.roles, key=lambda role: self.roles[role].total - self.roles[role].resident)
        need, room = f"{self.peak / GIB:.1f}", f"{self.gpu_bytes / GIB:.1f}"
        spared = round((1 - SPARED) * self.gpu_bytes)
        remedies = [
            *self._remedies(name, spared - self.resident + self.roles[name].resident),
            *self._more_ranks(spared),
        ]
        changes = (
            f"to fit with a tenth to spare: {'; or '.join(remedies)}"
            if remedies
            else "smaller micro-batches, checkpointing, host memory and more ranks do not suffice"
        )
        yield f"a rank needs {need} GiB and its GPU has {room} ({self.parts(name)}); {changes}"

    @cached_property
    def longest_sequences(self) -> dict[str, int]:
        """Tokens of the longest sequence that fits, for each role that learns, by name; empty for a CPU.

        A tenth of the GPU and the other roles' resident memory are left free.
        """
        if self.gpu_bytes is None:
            return {}
        spared = round((1 - SPARED) * self.gpu_bytes) - self.resident
        loads = {name: self._load(name, self.ranks) for name in self.roles}
        return {
            name: self._engines[name].longest_sequence(load, spared + self.roles[name].resident)
            for name, load in loads.items()
            if load.role.trains
        }

    def parts(self, role: str) -> str:
        """Return a description of a role's memory, part by part."""
        memory = self.roles[role]
        choices = {"activations": f" ({memory.recomputing})" if memory.recomputing else ""}
        parts = (f"{name} {size / GIB:.1f}{choices.get(name, '')}" for name in PARTS if (size := getattr(memory, name)))
        return f"{role} {memory.total / GIB:.1f} GiB: {', '.join((*parts, *filter(None, [memory.learning])))}"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan in bytes, for `--json`."""
        roles = {
            role: {name: getattr(memory, name) for name in (*PARTS, "resident", "total")}
            for role, memory in self.roles.items()
        }
        return {
            "peak": self.peak,
            "resident": self.resident,
            "gpu": self.gpu_bytes,
            "longest": self.longest_sequences,
            "roles": roles,
        }

    def _of_ranks(self, ranks: int) -> dict[str, Memory]:
        memories = {name: settings.memory(self._load(name, ranks)) for name, settings in self._engines.items()}
        return {name: memory for name, memory in memories.items() if memory is not None}

    def _load(self, name: str, ranks: int) -> RankLoad:
        config, model = self._config, self._models[name]
        sequences = config.rollout.batch_size * config.rollout.group_size / config.training.num_minibatches
        bound = getattr(config.workflow.settings, "max_tokens", None) if config.workflow is not None else None
        return RankLoad(
            model.description,
            model.shapes,
            roles_of(config.algorithm, config.training.updates)[name],
            config.model.dtype,
            ranks,
            tokens=None if bound is None else round(sequences * bound / ranks),
            longest=config.longest_sequence,
            gpu_bytes=self.gpu_bytes,
            shows_images=bool(getattr(getattr(config.workflow, "settings", None), "shows_images", False)),
        )

    def _remedies(self, role: str, room: int) -> Iterator[str]:
        section = f"roles.{role}" if role in self._config.roles else "train_engine"
        for changes in self._engines[role].remedies(self._load(role, self.ranks), room):
            yield " ".join(f"{section}.{change}" for change in changes.split())

    def _more_ranks(self, room: int) -> Iterator[str]:
        ranks, named = 1 << self.ranks.bit_length(), self._config.placement.training
        while ranks <= MOST_RANKS:
            if self._accepts(ranks) and _peak(self._of_ranks(ranks)) <= room:
                has_gpus = named is None or ranks <= len(named)
                yield f"launcher.trainer_processes={ranks}" if has_gpus else f"{ranks} GPUs for training in placement"
                return
            ranks *= 2

    def _accepts(self, ranks: int) -> bool:
        """Return True if no engine's check finds a problem with this number of ranks."""
        launcher, changes = self._config.launcher, {"trainer_processes": ranks}
        current = launcher.settings
        settings = current.model_copy(update=changes) if isinstance(current, Settings) else {**current, **changes}
        config = self._config.model_copy(update={"launcher": replace(launcher, settings=settings)})
        engines = (chosen.settings for chosen in (config.train_engine, *config.roles.values()))
        return not any(list(engine.check(config)) for engine in engines if isinstance(engine, Settings))


def _peak(roles: Mapping[str, Memory]) -> int:
    temporary = max((memory.total - memory.resident for memory in roles.values()), default=0)
    return temporary + sum(memory.resident for memory in roles.values())
