"""What a run will take, known before it starts and without torch: what each rank of the trainer will hold."""

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
"""Of a GPU, by what is proposed: for CUDA itself, what the allocator cannot use, and the plan's own error."""
PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "head")


class PlansMemory(Protocol):
    """Settings of an engine that know what it will take."""

    def memory(self, load: RankLoad) -> Memory | None:
        """What the engine will hold with these settings; None for a model whose layers it does not know.

        Raises:
            RunError: the engine cannot train this model with these settings, and why.
        """

    def remedies(self, load: RankLoad, room: int) -> list[str]:
        """Changes of these settings that bring it below `room` bytes: each `key=value`, or several and blanks."""

    def longest_sequence(self, load: RankLoad, room: int) -> int:
        """Tokens of the longest sequence with which it stays below `room` bytes; 0 for none."""


def estimate(config: RunConfig, models: Mapping[str, StoredModel], engines: Mapping[str, PlansMemory]) -> Estimate:
    """What the plan of a run shows of memory; a mistake where it cannot fit.

    Args:
        config: of the run.
        models: by role.
        engines: the settings of the engine of each role that can tell.

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
    """What a rank holds, part by part for each role, and where."""
    if not plan.roles:
        yield "memory", "not known: config.json lacks sizes, or the model sees images"
        return
    for role in plan.roles:
        yield "memory", plan.parts(role)
    if plan.gpu_bytes is None:
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        place = f"this machine has {machine / GIB:.0f} (placement.gpu_memory_gib plans for GPUs elsewhere)"
    else:
        place = f"its GPU has {plan.gpu_bytes / GIB:.1f}, of which CUDA itself takes some"
    yield "", f"{plan.peak / GIB:.1f} GiB for each of {plan.ranks} rank(s) in all; {place}"
    servers = None if config.inference_engine is None else config.inference_engine.settings
    keeps_memory = getattr(servers, "needs_gpu", False) and not config.takes_turns  # then the plan has its own row
    beside = "; the servers on its GPU are not counted" if config.placement.colocated and keeps_memory else ""
    for role, tokens in plan.longest_sequences.items():
        yield "longest", f"{role}: {tokens:,} tokens of a sequence or a micro-batch fit with a tenth to spare{beside}"
    if config.placement.colocated and plan.gpu_bytes is not None and not keeps_memory:
        held = plan.resident if config.takes_turns else plan.peak
        left = (plan.gpu_bytes - held) / GIB
        yield "colocated", f"the trainer holds {held / GIB:.1f} GiB while servers generate in {left:.1f} GiB"


class MemoryPlan:
    """What a rank of the trainer will hold, for every role whose engine and model are known.

    Args:
        config: of the run.
        models: by role.
        engines: settings, by role.
        gpu_bytes: of a rank's GPU, None for a CPU.

    Attributes:
        roles: what each takes by itself, by name.
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
        """Bytes of a rank between steps."""
        return sum(memory.resident for memory in self.roles.values())

    @property
    def peak(self) -> int:
        """Bytes of a rank when they are most: one role computes at a time, and the others stay."""
        return _peak(self.roles)

    def problems(self) -> Iterator[str]:
        """That it cannot fit, and what would."""
        if self.gpu_bytes is None or self.peak <= self.gpu_bytes:
            return
        name = max(self.roles, key=lambda role: self.roles[role].total - self.roles[role].resident)
        need, room = f"{self.peak / GIB:.1f}", f"{self.gpu_bytes / GIB:.1f}"
        spared = round((1 - SPARED) * self.gpu_bytes)
        cures = [*self._remedies(name, spared - self.resident + self.roles[name].resident), *self._more_ranks(spared)]
        message = (
            "; or ".join(cures) or "none of fewer tokens at once, checkpointing, host memory and more ranks is enough"
        )
        yield (
            f"a rank needs {need} GiB and its GPU has {room} ({self.parts(name)}); "
            f"what fits with a tenth to spare: {message}"
        )

    @cached_property
    def longest_sequences(self) -> dict[str, int]:
        """Tokens of the longest sequence of each role that learns, by name.

        A tenth of the GPU is spared, and the other roles' memory is in it. Without a GPU nothing is said.
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
        """What a role takes, in words."""
        memory = self.roles[role]
        choices = {"activations": f" ({memory.recomputing})" if memory.recomputing else ""}
        parts = (f"{name} {size / GIB:.1f}{choices.get(name, '')}" for name in PARTS if (size := getattr(memory, name)))
        return f"{role} {memory.total / GIB:.1f} GiB: {', '.join((*parts, *filter(None, [memory.learning])))}"

    def as_dict(self) -> dict[str, Any]:
        """For programs, in bytes."""
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
        found = {}
        for name, settings in self._engines.items():
            if (memory := settings.memory(self._load(name, ranks))) is not None:
                found[name] = memory
        return found

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
        place = f"roles.{role}" if role in self._config.roles else "train_engine"
        for changes in self._engines[role].remedies(self._load(role, self.ranks), room):
            yield " ".join(f"{place}.{change}" for change in changes.split())

    def _more_ranks(self, room: int) -> Iterator[str]:
        ranks, named = 1 << self.ranks.bit_length(), self._config.placement.training
        while ranks <= MOST_RANKS:
            if self._may_be(ranks) and _peak(self._of_ranks(ranks)) <= room:
                has_place = named is None or ranks <= len(named)
                yield f"launcher.trainer_processes={ranks}" if has_place else f"{ranks} GPUs for training in placement"
                return
            ranks *= 2

    def _may_be(self, ranks: int) -> bool:
        """Whether the engines would take so many ranks, however these are told to divide the work."""
        launcher, asked = self._config.launcher, {"trainer_processes": ranks}
        held = launcher.settings
        settings = held.model_copy(update=asked) if isinstance(held, Settings) else {**held, **asked}
        config = self._config.model_copy(update={"launcher": replace(launcher, settings=settings)})
        engines = (chosen.settings for chosen in (config.train_engine, *config.roles.values()))
        return not any(list(engine.check(config)) for engine in engines if isinstance(engine, Settings))


def _peak(roles: Mapping[str, Memory]) -> int:
    moving = max((memory.total - memory.resident for memory in roles.values()), default=0)
    return moving + sum(memory.resident for memory in roles.values())
