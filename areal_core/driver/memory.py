"""The part of a plan that is about memory: what each rank of the trainer will hold, and what a weight sync moves."""

from __future__ import annotations

import json
import operator
import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from areal_core.config import Settings
from areal_core.config.needs import roles_of
from areal_core.interfaces.memory import Memory, PlansMemory, RankLoad

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from areal_core.config import RunConfig
    from areal_core.interfaces.model import StoredModel

GIB: Final = 1 << 30
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2}
BYTES_PER_S: Final = {"core/broadcast": 50e9, "core/ipc": 20e9, "core/memory": 1.3e9}
"""Of a whole weight sync by its transport: docs/figures.md, "Inference servers on H200s"."""
LONGEST_HEADER: Final = 1 << 28
QUESTION_S: Final = 10.0
MOST_RANKS: Final = 1024
SPARED: Final = 0.1
"""Of a GPU, by what is proposed: for CUDA itself, what the allocator cannot use, and the plan's own error."""
PARTS: Final = ("parameters", "gradients", "optimizer", "activations", "head")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in a folder's safetensors, from the files' headers.

    Raises:
        OSError, ValueError, KeyError: a file cannot be read, or is none.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        if not file.is_file():
            raise ValueError(f"{file.name} is no file")
        with file.open("rb") as opened:
            size = int.from_bytes(opened.read(8), "little")
            if size > LONGEST_HEADER:
                raise ValueError(f"{file.name} is no safetensors file")
            header: dict[str, Any] = json.loads(opened.read(size))
        header.pop("__metadata__", None)
        needed = 8 + size + max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        if (found := file.stat().st_size) != needed:
            raise ValueError(f"{file.name} has {found} bytes, and by its header it should have {needed}")
        shapes |= {name: tuple(map(operator.index, tensor["shape"])) for name, tensor in header.items()}
    _check_index(folder, shapes)
    return shapes


def _check_index(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `ValueError` where an index is none, or names files or tensors that are not there."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file() or (folder / "model.safetensors").is_file():  # which is read first
        return
    try:
        places = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{index.name} is no index: {type(error).__name__}: {error}") from error
    missing = sorted({str(name) for name in places.values() if not (folder / str(name)).is_file()})
    if missing:
        raise ValueError(f"{index.name} names files that are missing: {', '.join(missing[:3])}")
    if absent := sorted(places.keys() - shapes.keys()):
        raise ValueError(f"{index.name} names tensors that no file holds: {', '.join(absent[:3])}")


def gpu_bytes_of(config: RunConfig) -> int | None:
    """Memory of the smallest GPU that trains, as the config says, or else this machine's; None where none is known."""
    placement = config.placement
    if placement.gpu_memory_gib is not None:
        return round(placement.gpu_memory_gib * GIB)
    asked = shutil.which("nvidia-smi") if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else None
    if asked is None:
        return None
    command = [asked, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=QUESTION_S, check=True).stdout
        sizes = [int(line) << 20 for line in answer.split()]  # told in MiB
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    chosen = [sizes[gpu] for gpu in placement.training or range(len(sizes)) if gpu < len(sizes)]
    return min(chosen, default=None)


class MemoryPlan:
    """What a rank of the trainer will hold, for every role whose engine and model are known.

    Args:
        config: of the run.
        models: by role.
        gpu_bytes: of a rank's GPU, None for a CPU.

    Attributes:
        roles: what each takes by itself, by name.
    """

    def __init__(self, config: RunConfig, models: Mapping[str, StoredModel], gpu_bytes: int | None) -> None:
        self._config, self._models = config, models
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
        told = "; or ".join(cures) or "none of fewer tokens at once, checkpointing and more ranks is enough"
        yield (
            f"train_engine: a rank needs {need} GiB and its GPU has {room} ({self.parts(name)}); "
            f"what fits with a tenth to spare: {told}"
        )

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
        return {"peak": self.peak, "resident": self.resident, "gpu": self.gpu_bytes, "roles": roles}

    def _of_ranks(self, ranks: int) -> dict[str, Memory]:
        found = {}
        for name, (settings, load) in self._asked(ranks).items():
            if (memory := settings.memory(load)) is not None:
                found[name] = memory
        return found

    def _asked(self, ranks: int) -> dict[str, tuple[PlansMemory, RankLoad]]:
        config = self._config
        asked: dict[str, tuple[PlansMemory, RankLoad]] = {}
        sequences = config.rollout.batch_size * config.rollout.group_size / config.training.num_minibatches
        bound = config.workflow.keywords().get("max_tokens") if config.workflow is not None else None
        tokens = None if bound is None else round(sequences * bound / ranks)
        for name, role in roles_of(config.algorithm, config.training.updates).items():
            settings, model = config.roles.get(name, config.train_engine).settings, self._models.get(name)
            if model is not None and isinstance(settings, PlansMemory):
                load = RankLoad(model.description, model.shapes, role, config.model.dtype, ranks)
                asked[name] = (
                    settings,
                    replace(load, tokens=tokens, longest=config.longest_sequence, gpu_bytes=self.gpu_bytes),
                )
        return asked

    def _remedies(self, role: str, room: int) -> Iterator[str]:
        settings, load = self._asked(self.ranks)[role]
        place = f"roles.{role}" if role in self._config.roles else "train_engine"
        for changes in settings.remedies(load, room):
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
