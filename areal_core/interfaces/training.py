"""Training engines: what the trainer asks of them, and what some of them offer beyond that."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch

    from areal_core.data.batch import PackedBatch
    from areal_core.data.metrics import Metric
    from areal_core.interfaces.algorithm import LossSpec
    from areal_core.interfaces.model import ModelReference, Role


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """What an engine needs to know of the run to set up a model and its optimizer.

    Attributes:
        total_updates: number of optimizer updates in the whole run, for schedules that decay.
        temperature: sampling temperature; 1 if nothing is sampled. The engine divides logits by it, in all outputs.
        learning_rate: the algorithm's default, for an engine whose own settings have none.
        is_exported: whether the run writes the model for users. The engine then tries in `setup` what an export needs.
        shows_images: whether batches may have images. If not, the engine does not train the model's vision tower.
    """

    total_updates: int
    temperature: float
    learning_rate: float = 1e-6
    is_exported: bool = False
    shows_images: bool = False


@dataclass(frozen=True, slots=True)
class AdamWSettings:
    """Hyperparameters of AdamW (arXiv 1711.05101) for the next updates; see `SteerableEngine`.

    Attributes:
        learning_rate: step size; at least 0.
        betas: decay rates of the first and the second moment, each at least 0 and below 1.
        epsilon: added to the denominator; above 0.
        weight_decay: decoupled decay of matrices; at least 0.
        max_gradient_norm: norm to which a larger gradient is clipped, above 0; None: no clipping.

    Raises:
        ValueError: a value is out of its range.

    Example:
        >>> from areal_core.engines import AdamWSettings
        >>> AdamWSettings(learning_rate=1e-4, betas=(0.9, 0.95)).weight_decay
        0.0
    """

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    max_gradient_norm: float | None = None

    def __post_init__(self) -> None:
        is_positive = self.epsilon > 0 and (self.max_gradient_norm is None or self.max_gradient_norm > 0)
        in_range = self.learning_rate >= 0 and self.weight_decay >= 0 and all(0 <= beta < 1 for beta in self.betas)
        is_finite = all(map(math.isfinite, (self.learning_rate, self.epsilon, self.weight_decay)))
        if not (is_positive and in_range and is_finite):
            raise ValueError(f"{self} has a value out of its range")


OPTIONAL_OUTPUTS = ("top_logprobs", "sum_pi_squared")
"""Outputs of a `TrainEngine` that only some engines compute. Settings declare each as `computes_OUTPUT`."""


class TrainEngine(Protocol):
    """A model in a role, on every rank of the trainer (SPMD).

    All ranks call the same methods with the same whole batch. The engine takes its rank's share, and returns results of
    the whole batch on every rank. Batches are already shifted (`areal_core.data.shift_to_predictions`).

    Example:
        >>> import torch
        >>> from areal_core.data import PackedBatch, Ragged
        >>> from areal_core.engines import ModelReference, OptimizerSettings, TrainEngine
        >>> from areal_core.sdk import ACTOR
        >>> class Unigram(TrainEngine):  # to train, it needs the other methods, too
        ...     # one logit for each token, whatever comes before it
        ...     def setup(self, model, role, settings):
        ...         self.logits, self.temperature = torch.zeros(4), settings.temperature
        ...
        ...     def forward(self, batch, outputs):
        ...         logprobs = torch.log_softmax(self.logits / self.temperature, -1)
        ...         return {"logprobs": logprobs[batch["targets"]]}
        >>> engine = Unigram()
        >>> engine.setup(ModelReference("/models/tiny"), ACTOR, OptimizerSettings(total_updates=10, temperature=1.0))
        >>> tokens = {"input_ids": torch.tensor([3, 1]), "targets": torch.tensor([1, 2])}
        >>> engine.forward(PackedBatch(Ragged(torch.tensor([2]), tokens)), ["logprobs"])
        {'logprobs': tensor([-1.3863, -1.3863])}
    """

    def setup(self, model: ModelReference, role: Role, settings: OptimizerSettings) -> None:
        """Load the model. `torch.distributed` has been initialized, with a gloo group for CPU tensors.

        Raises:
            RunError: the model cannot be loaded, or its log-probabilities cannot be computed by this engine.
        """

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """Compute outputs of the whole batch without gradients.

        Args:
            batch: with `input_ids` and `targets`.
            outputs: names among `logprobs`, `entropy` (a head of the vocabulary) and `values` (a scalar head), and
                those that `ComparingEngine` adds. An engine may offer `sum_pi_squared`: Σ_v π(v)², the sum of the
                squared probabilities of all tokens at the temperature of `logprobs`. Its settings then declare
                `computes_sum_pi_squared`.

        Returns:
            For each name float32 [sum(T)] on the CPU. Position t predicts `targets[t]`.
        """

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """Make one optimizer update on the sum of all losses.

        Each batch is split over ranks and micro-batches; a unit is never split. Its `loss` is called for each
        micro-batch with the outputs on its tokens (with gradients, on the engine's device). It returns a *sum*, so that
        any split adds up to the same gradient. Metrics are combined over works, micro-batches and ranks by their kind.
        If the gradient is 0, as when no token has a weight, parameters stay as they are, and momentum does not move
        them either.

        An engine may offer outputs that are wider than one number a token. They are for losses alone and never leave
        the device: `hidden`, the last hidden states [T, hidden size]; `topk:K`, the log-probabilities of the K most
        likely tokens, [T, K] float32 in descending order, and with it `topk:K:ids`, [T, K] int64; `top_logprobs`, the
        log-probabilities of the tokens `top_ids` of the batch, [T, K] float32 in their order. An engine whose settings
        declare `computes_top_logprobs` offers the last.

        Args:
            works: all losses of this role.

        Returns:
            The metrics of the whole update on every rank, with the means `loss`, `gradient_norm` (before clipping) and
            `learning_rate`, and the sum `skipped`: 1 if a non-finite gradient left the parameters as they were.

        Raises:
            RunError: the role is frozen.
        """

    def update_ema(self, source: TrainEngine, decay: float) -> None:
        """Set own parameters to decay x own + (1 - decay) x source; see `EMA`. Collective.

        `source` is an engine of the same kind and layout.
        """

    def named_full_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and whole tensor of each parameter and persistent buffer, as in the model's safetensors.

        Tied ones are yielded once. Each has the dtype that servers compute in: `ModelReference.dtype`, or float32 where
        transformers keeps it so. Collective: every rank must exhaust it. A tensor is valid until the next one is asked
        for.
        """

    def named_meta_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `named_full_parameters` yields, in its order, as tensors on the device `meta`, without values.

        Shapes are those of whole tensors. Not collective: weight syncs learn names and sizes without a gather.
        """

    def save(self, folder: Path) -> None:
        """Write parameters, optimizer, schedule and random state to `folder`; collective."""

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, bit for bit; collective. The number of ranks may differ."""

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder with safetensors, config and tokenizer; collective.

        `folder` is temporary: the caller renames it once it is complete, and removes it if this fails.
        """

    def close(self) -> None:
        """Free everything; safe to call twice."""


@runtime_checkable
class MeasuringEngine(Protocol):
    """A `TrainEngine` that measures its own work, such as tokens a second.

    These numbers depend on ranks and micro-batches, which the metrics of `train` never do. They are the metrics
    `engine/NAME` of a run.

    Example:
        >>> from areal_core.engines import MeasuringEngine
        >>> class Engine:  # and the methods of `TrainEngine`, which count tokens
        ...     tokens = 0
        ...
        ...     def measurements(self):
        ...         tokens, self.tokens = self.tokens, 0
        ...         return {"tokens": float(tokens)}  # the metric `engine/tokens`
        >>> engine = Engine()
        >>> isinstance(engine, MeasuringEngine)
        True
        >>> engine.tokens += 512
        >>> engine.measurements(), engine.measurements()
        ({'tokens': 512.0}, {'tokens': 0.0})
    """

    def measurements(self) -> dict[str, float]:
        """Return measurements since the last call, of all ranks together. Waits for no device and no rank."""


@runtime_checkable
class SelectiveEngine(Protocol):
    """A `TrainEngine` that does not read all tensors in the model's files.

    Example:
        >>> from areal_core.engines import SelectiveEngine
        >>> class Engine:  # and the methods of `TrainEngine`
        ...     names_in_files = ["lm_head.weight", "mtp.fc.weight"]
        ...
        ...     def unread_weights(self):
        ...         return [name for name in self.names_in_files if name.startswith("mtp.")]
        >>> isinstance(Engine(), SelectiveEngine), Engine().unread_weights()
        (True, ['mtp.fc.weight'])
    """

    def unread_weights(self) -> Sequence[str]:
        """Return the names of tensors in the model's files that the engine has not read, such as those of multi-token
        prediction. Weight syncs leave them out, and servers keep what they have loaded. Not collective."""


@runtime_checkable
class ComparingEngine(Protocol):
    """A `TrainEngine` that also computes `divergence:ROLE:BETA`, with gradients where it learns.

    P is the distribution of ROLE after a token, Q that of the engine's own role, and M = β P + (1 - β) Q. The output is
    β KL(P ‖ M) + (1 - β) KL(Q ‖ M) in nats, [T] float32: the generalized Jensen-Shannon divergence (GKD, arXiv
    2306.13649, equation 1). At the ends, where that is 0, it is KL(P ‖ Q) for BETA 0 and KL(Q ‖ P) for BETA 1. Neither
    distribution leaves the device, and the other role learns nothing.

    Example:
        >>> import torch
        >>> from areal_core.engines import ComparingEngine
        >>> class Engine:  # and the other methods of `TrainEngine`
        ...     def __init__(self, logits):
        ...         self.logprobs = torch.log_softmax(torch.tensor([logits]), -1)  # [T, vocabulary]
        ...
        ...     def compare_with(self, engines):
        ...         self.engines = engines
        ...
        ...     def forward(self, batch, outputs):  # of this one output, with BETA 0: KL(P ‖ Q)
        ...         _, role, _ = outputs[0].split(":")
        ...         other = self.engines[role].logprobs
        ...         return {outputs[0]: (other.exp() * (other - self.logprobs)).sum(-1)}
        >>> actor, teacher = Engine([0.0, 0.0]), Engine([1.0, 0.0])
        >>> actor.compare_with({"actor": actor, "teacher": teacher})
        >>> actor.forward(None, ["divergence:teacher:0"])
        {'divergence:teacher:0': tensor([0.1109])}
        >>> isinstance(actor, ComparingEngine)
        True
    """

    def compare_with(self, engines: Mapping[str, TrainEngine]) -> None:
        """Take the engines of all roles, by role, its own among them. Called once, when all of them are set up."""


@runtime_checkable
class AdapterEngine(Protocol):
    """A `TrainEngine` that may freeze its model and train an adapter beside it (LoRA, arXiv 2106.09685).

    Attributes:
        begins_elsewhere: whether training begins from an adapter's weights, and not from those in the model's folder.
            Then weights are synced before the first prompt.

    Example:
        >>> from areal_core.engines import AdapterEngine, ModelReference
        >>> from areal_core.sdk import REFERENCE
        >>> class Engine:  # and the methods of `TrainEngine`
        ...     begins_elsewhere = False
        ...
        ...     def __init__(self, model, has_adapter=True):
        ...         self.model, self.has_adapter = model, has_adapter
        ...
        ...     def reference_from_base(self, model, role):
        ...         return Engine(model, has_adapter=False) if model == self.model else None
        >>> engine = Engine(ModelReference("/models/tiny"))
        >>> isinstance(engine, AdapterEngine)
        True
        >>> engine.reference_from_base(ModelReference("/models/tiny"), REFERENCE).has_adapter
        False
        >>> engine.reference_from_base(ModelReference("/models/other"), REFERENCE)  # None: it is loaded as usual
    """

    begins_elsewhere: bool

    def reference_from_base(self, model: ModelReference, role: Role) -> TrainEngine | None:
        """Return an engine of the model with its adapter switched off, for a role that never changes.

        It copies no parameter, computes between calls of this engine, and is closed with this engine at the latest.
        None if the model without its adapter is not `model`.
        """


@runtime_checkable
class SteerableEngine(Protocol):
    """A `TrainEngine` whose optimizer is set from outside while it trains, by a program without a schedule of its own.

    Example:
        >>> from areal_core.engines import AdamWSettings, SteerableEngine
        >>> class Engine:  # and the methods of `TrainEngine`
        ...     rate, moments = 1e-6, [0.5]
        ...
        ...     def set_optimizer(self, settings):
        ...         self.rate = settings.learning_rate
        ...
        ...     def reset_optimizer(self):
        ...         self.moments = [0.0]
        >>> engine = Engine()
        >>> isinstance(engine, SteerableEngine)
        True
        >>> engine.set_optimizer(AdamWSettings(learning_rate=1e-4))
        >>> engine.rate
        0.0001
    """

    def set_optimizer(self, settings: AdamWSettings) -> None:
        """Use these hyperparameters from the next update on, instead of those of the config and its schedule.

        Raises:
            RunError: the engine's optimizer is not AdamW.
        """

    def reset_optimizer(self) -> None:
        """Return moments and step count to those before the first update. Parameters stay as they are.

        Raises:
            RunError: the engine's optimizer is not AdamW.
        """


@runtime_checkable
class SnapshotEngine(Protocol):
    """A `TrainEngine` whose checkpoints can be written while training continues.

    Checkpoints of other engines are written by `save`, while training waits.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> import torch
        >>> from areal_core.engines import SnapshotEngine
        >>> class Engine:  # and the methods of `TrainEngine`
        ...     weights = torch.zeros(2)
        ...
        ...     def snapshot_size(self):
        ...         return self.weights.nbytes
        ...
        ...     def snapshot(self):
        ...         copy = self.weights.clone()
        ...         return lambda folder: torch.save(copy, folder / "weights.pt")
        >>> engine = Engine()
        >>> write = engine.snapshot()
        >>> engine.weights += 1  # training continues
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write(Path(folder))
        ...     torch.load(Path(folder, "weights.pt"))
        tensor([0., 0.])
        >>> isinstance(engine, SnapshotEngine), engine.snapshot_size()
        (True, 8)
    """

    def snapshot_size(self) -> int:
        """Return the bytes of host memory that this rank's next snapshot takes, beyond those that former ones hold."""

    def snapshot(self) -> Callable[[Path], None]:
        """Copy to host memory what `save` would write now; collective.

        Returns:
            A function that writes the copy to a folder, for `load`. It is called on all ranks in another thread, while
            training continues. It may be collective, but not on a group that training uses. It is not called after the
            next `snapshot`, which may reuse the memory of this one.
        """
