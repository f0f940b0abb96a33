"""Where a model comes from, and the role that it has for an algorithm."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A Hugging Face model folder (config, safetensors, tokenizer) and how to load it.

    Attributes:
        path: a folder on this machine, or a name on the Hugging Face hub.
        dtype: of the parameters while the engine computes.
        trust_remote_code: whether code that ships with the model may run.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class StoredModel:
    """What a model's folder says of it, without loading it.

    Attributes:
        folder: on this machine.
        description: its config.json.
        shapes: of the tensors in its safetensors, by name.
    """

    folder: Path
    description: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EMA:
    """A frozen role, a target model, that is an exponential moving average of a learning one.

    Attributes:
        role: the learning one.
        every: training steps between two updates of the average.
        decay: what is kept of itself each time: own = decay x own + (1 - decay) x learning. 0 is a copy.
    """

    role: str
    every: int = 1
    decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Role:
    """A model that an algorithm trains or asks.

    Attributes:
        name: its key below `roles` in a config, and its folder in a checkpoint.
        head: `vocabulary` gives log-probabilities and entropy, `scalar` one value for each token.
        trains: whether it learns; a frozen role has no optimizer.
        ema: of a frozen role, whose average it is; None where it never changes.
        needs_path: whether its section must name a model of its own, as a teacher's must: without a path it would be a
            copy of the run's, from which nothing can be learned.
    """

    name: str
    head: Literal["vocabulary", "scalar"] = "vocabulary"
    trains: bool = False
    ema: EMA | None = None
    needs_path: bool = False

    @property
    def changes(self) -> bool:
        """Whether its parameters do, so that checkpoints hold them."""
        return self.trains or self.ema is not None


ACTOR = Role("actor", trains=True)
"""The policy that is trained."""
CRITIC = Role("critic", head="scalar", trains=True)
"""Says of each token what reward is to be expected."""
REFERENCE = Role("reference")
"""The model that the policy began as, or another one that it shall stay near."""


class ModelSource(Protocol):
    """Makes or fetches a model folder before the run starts; runs once, in a process of its own."""

    def prepare(self, cache: Path) -> Path:
        """The folder of the model, made below `cache` if it is not there yet. Must be safe to call again."""


@runtime_checkable
class FindsModel(Protocol):
    """A `ModelSource` that knows whether its model is there: a run whose model is waits for nobody who makes one."""

    def find(self, cache: Path) -> Path | None:
        """What `prepare` would return, where nothing is left to be done; else None. Writes nothing."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the settings of an engine know of a run before it starts; see `Settings.estimate`.

    Attributes:
        rows: label and text each, for the plan that `--dry-run` shows.
        misfits: why it cannot fit where it shall run, one line each.
        figures: numbers for programs, by name.
        checkpoint_bytes: size of a checkpoint of all roles; 0 if it is not known.
    """

    rows: Sequence[tuple[str, str]] = ()
    misfits: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_bytes: int = 0
