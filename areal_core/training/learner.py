"""Training on one batch: an algorithm's forward passes and updates, on the engines of its roles."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal_core.data import combine, shift_to_predictions
from areal_core.errors import RunError
from areal_core.interfaces.training import MeasuringEngine
from areal_core.training.context import BatchContext
from areal_core.training.token_log import TokenLog

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from areal_core.config import RunConfig
    from areal_core.data import Metric, PackedBatch
    from areal_core.interfaces.algorithm import Algorithm, LossSpec
    from areal_core.interfaces.model import Role
    from areal_core.interfaces.training import TrainEngine


class Learner:
    """Trains on batches, the same on every rank.

    Args:
        config: of the run.
        algorithm: prepares batches and defines losses.
        roles: by name; the first one is the policy.
        engines: of the roles, by name.
        logged_groups: number of groups of each batch whose tokens are logged.

    Attributes:
        has_learned: whether the policy has been updated since this was set to False.
        logged_groups: see above; may be changed between two batches.
        logged: on the main rank, a few groups of the last batch with what the losses computed of their tokens; see
            `TokenLog`.
    """

    def __init__(
        self,
        config: RunConfig,
        algorithm: Algorithm,
        roles: Mapping[str, Role],
        engines: Mapping[str, TrainEngine],
        logged_groups: int = 0,
    ) -> None:
        self._config = config
        self._algorithm = algorithm
        self._roles = roles
        self._engines = engines
        self.logged_groups = logged_groups
        self._skipped: dict[str, int] = {}
        self._first = next(iter(roles))
        self.has_learned = False
        self.logged: PackedBatch | None = None

    @property
    def changing(self) -> dict[str, TrainEngine]:
        """Engines whose parameters change and belong into checkpoints, by role: those that learn, and their EMAs."""
        return {name: self._engines[name] for name, role in self._roles.items() if role.changes}

    @property
    def policy(self) -> TrainEngine:
        """Engine whose weights are synced and exported: that of the first role."""
        return self._engines[self._first]

    def learn(self, batch: PackedBatch, step: int, version: int, state: dict[str, torch.Tensor]) -> dict[str, float]:
        """Train on a batch and return the metrics of the step.

        Args:
            batch: as it came from its source, not shifted.
            step: batches that were trained on before.
            version: of the weights that were synced last.
            state: tensors of the algorithm's own.

        Returns:
            Numbers by name. Those of all roles but the first have the role in their name.

        Raises:
            RunError: gradients stay non-finite.
        """
        context = BatchContext(self._config.training, self._engines, self._config.seed, step, version, state)
        prepared = self._algorithm.prepare(shift_to_predictions(batch), context)
        log = TokenLog(prepared, self.logged_groups)
        learned = [self._update(log.watch(works), step) for works in self._algorithm.updates(log.batch, context)]
        self.logged = log.gather()
        for name, role in self._roles.items():
            if role.ema is not None and (step + 1) % role.ema.every == 0:
                self._engines[name].update_ema(self._engines[role.ema.role], role.ema.decay)
        metrics = combine([*learned, context.metrics])
        numbers: dict[str, float] = {}
        for name, metric in metrics.items():
            numbers |= metric.as_numbers(f"train/{name}")
        return {**numbers, **self._measurements()}

    def close(self) -> None:
        """Close the engines."""
        for engine in self._engines.values():
            engine.close()

    def _measurements(self) -> dict[str, float]:
        """Return the engines' own measurements, such as times. Those of later roles have the role in their name."""
        return {
            f"engine/{'' if role == self._first else f'{role}/'}{name}": value
            for role, engine in self._engines.items()
            if isinstance(engine, MeasuringEngine)
            for name, value in engine.measurements().items()
        }

    def _update(self, works: Sequence[LossSpec], step: int) -> dict[str, Metric]:
        """Make one optimizer update of each role that has losses."""
        metrics: dict[str, Metric] = {}
        for role in dict.fromkeys(work.role for work in works):
            results = self._engines[role].train([work for work in works if work.role == role])
            self.has_learned |= role == self._first
            self._skipped[role] = self._skipped.get(role, 0) + 1 if bool(results["skipped"].values) else 0
            if self._skipped[role] >= self._config.training.max_skipped_updates:
                loss = results["loss"].as_numbers("loss")["loss"]
                what = "gradient" if math.isfinite(loss) else f"loss ({loss})"
                raise RunError(
                    f"the {what} of {role} was not finite in {self._skipped[role]} updates in a row (step {step})",
                    hints=["lower its learning_rate, or check the rewards; training.max_skipped_updates is the limit"],
                )
            prefix = "" if role == self._first else f"{role}/"
            metrics |= {f"{prefix}{name}": value for name, value in results.items()}
        return metrics
