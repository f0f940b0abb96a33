"""Models of a run: their folders, their roles in an algorithm, and an engine's estimate of their memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


ELEMENT_BYTES: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2}
"""Bytes of a number, by the `dtype` of a model."""


@dataclass(frozen=True, slots=True)
class ModelReference:
    """A Hugging Face model folder (config, safetensors, tokenizer) and how to load it.

    Attributes:
        path: folder on this machine, or name on the Hugging Face hub.
        dtype: dtype in which the engine computes with the parameters.
        trust_remote_code: whether code that ships with the model may run.
    """

    path: str
    dtype: Literal["float32", "bfloat16"] = "float32"
    trust_remote_code: bool = False


@dataclass(frozen=True, slots=True)
class StoredModel:
    """The description of a model in its folder, without its weights.

    Attributes:
        folder: folder on this machine.
        description: contents of config.json.
        shapes: shapes of the tensors in its safetensors files, by name.
    """

    folder: Path
    description: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class EMA:
    """The exponential moving average of a role that trains, for a frozen role (a target model).

    Attributes:
        role: name of the role that trains.
        every: training steps between two updates of the average.
        decay: average = decay x average + (1 - decay) x parameters. With 0 each update copies the parameters.
    """

    role: str
    every: int = 1
    decay: float = 0.0


@dataclass(frozen=True, slots=True)
class Role:
    """A model that an algorithm trains or evaluates.

    Attributes:
        name: its key below `roles` in a config, and its folder in a checkpoint.
        head: `vocabulary` computes log-probabilities and entropy, `scalar` computes one value per token.
        trains: whether it has an optimizer. A role without one is frozen.
        ema: average that a frozen role follows; None if it never changes.
        needs_path: whether its section must name a model. A teacher without a path would be a copy of the run's model,
            from which nothing can be learned.
    """

    name: str
    head: Literal["vocabulary", "scalar"] = "vocabulary"
    trains: bool = False
    ema: EMA | None = None
    needs_path: bool = False

    @property
    def changes(self) -> bool:
        """Whether its parameters change, so that checkpoints contain them."""
        return self.trains or self.ema is not None


ACTOR = Role("actor", trains=True)
"""The policy that is trained."""
CRITIC = Role("critic", head="scalar", trains=True)
"""Predicts the expected reward at each token."""
REFERENCE = Role("reference")
"""The initial policy, or another model that the policy must stay close to."""


class ModelSource(Protocol):
    """Creates or downloads a model before the run starts. It runs once, in a process of its own.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from areal_core.engines import ModelResolver, ModelSource
        >>> class TinyModel(ModelSource):
        ...     def prepare(self, cache):
        ...         if self.find(cache) is None:
        ...             unfinished = Path(tempfile.mkdtemp(dir=cache))
        ...             (unfinished / "config.json").write_text('{"model_type": "qwen3"}')  # then weights and tokenizer
        ...             unfinished.rename(cache / "tiny")  # a killed process leaves no folder of this name
        ...         return cache / "tiny"
        ...
        ...     def find(self, cache):  # with this method it is a `ModelResolver`, too
        ...         return cache / "tiny" if (cache / "tiny").is_dir() else None
        >>> source = TinyModel()
        >>> isinstance(source, ModelResolver)
        True
        >>> with tempfile.TemporaryDirectory() as cache:
        ...     source.find(Path(cache)) is None, source.prepare(Path(cache)) == source.find(Path(cache))
        (True, True)
    """

    def prepare(self, cache: Path) -> Path:
        """Return the folder of the model, and create it below `cache` if it does not exist. Must be safe to repeat."""


@runtime_checkable
class ModelResolver(Protocol):
    """A `ModelSource` that can check for its model, so that a run with an existing model starts immediately."""

    def find(self, cache: Path) -> Path | None:
        """Return the folder of the model if it exists, else None. Writes nothing."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """An engine's estimate of the memory of a run, from its settings alone; see `Settings.estimate`.

    Attributes:
        rows: pairs of label and text for the plan that `--dry-run` shows.
        misfits: lines with the reasons why the run does not fit on its GPUs; empty if it fits.
        figures: numbers by name, for `--dry-run --json`.
        checkpoint_bytes: size of a checkpoint of all roles; 0 if it is not known.
        peak_bytes: largest memory of a rank of the trainer; 0 if it is not known.
        resident_bytes: memory of a rank between steps; 0 if it is not known.

    Example:
        >>> from math import prod
        >>> from pathlib import Path
        >>> from areal_core.engines import Estimate, StoredModel
        >>> def estimate(model: StoredModel, gpu_bytes: int) -> Estimate:
        ...     size = 16 * sum(map(prod, model.shapes.values()))  # parameters, gradients and both moments of Adam
        ...     misfits = [f"{model.folder.name} needs {size:,} bytes on each GPU"] if size > gpu_bytes else []
        ...     return Estimate([("memory", f"{size:,} bytes")], misfits, {"bytes": size}, peak_bytes=size)
        >>> model = StoredModel(Path("/models/tiny"), {"model_type": "qwen3"}, {"lm_head.weight": (1000, 64)})
        >>> estimate(model, gpu_bytes=500_000).misfits
        ['tiny needs 1,024,000 bytes on each GPU']
    """

    rows: Sequence[tuple[str, str]] = ()
    misfits: Sequence[str] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    checkpoint_bytes: int = 0
    peak_bytes: int = 0
    resident_bytes: int = 0
