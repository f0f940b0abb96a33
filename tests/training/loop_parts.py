"""A source, engine, algorithm and weight sync for tests of the loop, which record their calls."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from areal_core.config.sections import CheckpointSection, TrainingSection
from areal_core.data import Metric, PackedBatch, Trajectory
from areal_core.sdk import ACTOR, LossResult, LossSpec, Role
from areal_core.training.learner import Learner
from areal_core.training.loop import Trainer
from areal_core.training.metrics_logger import MetricsLogger
from areal_core.training.source import Interrupted, SharedSource, TrainingBatch
from areal_core.training.state import TrainerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path


def batch_of(*groups: int, tokens: int = 4) -> PackedBatch:
    """Return a batch with two sequences for each group."""
    trajectories = [
        Trajectory(
            {
                "input_ids": torch.arange(tokens) + 10 * group + sample,
                "loss_mask": torch.ones(tokens, dtype=torch.bool),
                "logprobs": torch.zeros(tokens),
                "versions": torch.zeros(tokens, dtype=torch.int32),
                "turn_ids": torch.zeros(tokens, dtype=torch.int32),
            },
            {"group_id": torch.tensor(group), "reward": torch.tensor(float(sample))},
        )
        for group in groups
        for sample in range(2)
    ]
    return PackedBatch.from_trajectories(trajectories)


NEEDS_FOLDER = b"needs folder"


def read(payload: bytes) -> TrainingBatch | None:
    """Make the batch of a rank, as `SharedSource` asks for it."""
    if payload == NEEDS_FOLDER:
        return None
    batch = PackedBatch.from_bytes(payload)
    groups = [(number, f"digest {number}") for number in batch["group_id"].unique().tolist()]
    return TrainingBatch(batch, groups, {"reward/mean": 0.5})


class Parts:
    """Source, engine, algorithm and weight sync in one object, which records the calls in `asked`."""

    encode, group_filters = None, ()

    def __init__(self, *, interrupt_at: int = -1, skip: bool = False, score: float = 0.5) -> None:
        self.asked: list[str] = []
        self.trained: list[list[int]] = []
        self.committed: list[tuple[int, str]] = []
        self.learns = ["actor"]
        self.version = 0
        self._interrupt_at = interrupt_at
        self._skip = skip
        self.scores = [score]

    # The source.

    def next_batch(self, step: int) -> bytes:
        if step == self._interrupt_at:
            raise Interrupted
        self.asked.append(f"batch {step}")
        return batch_of(4 * step, 4 * step + 1, 4 * step + 2, 4 * step + 3).to_bytes()

    def begin_evaluation(self) -> None:
        self.asked.append("evaluate")

    def end_evaluation(self, patience_s: float) -> dict[str, float]:
        self.asked.append("evaluated")
        return {"evaluation/reward": self.scores.pop(0) if len(self.scores) > 1 else self.scores[0]}

    def commit(self, step: int, checkpoint: Path) -> None:
        assert (checkpoint / "trainer.json").is_file(), "committed before it was complete"
        self.committed.append((step, checkpoint.name))

    def close(self) -> None:
        self.asked.append("close")

    # The engine.

    def forward(self, batch: PackedBatch, outputs: Any) -> dict[str, torch.Tensor]:
        return {"logprobs": torch.zeros(batch.token_count)}

    def train(self, works: Any) -> dict[str, Metric]:
        (work,) = works
        assert "targets" in work.batch
        self.trained.append(sorted(set(work.batch["group_id"].tolist())))
        result = work.loss(work.batch, {})
        return {**result.metrics, "loss": Metric.mean(float(len(self.trained))), "skipped": Metric.sum(self._skip)}

    def update_ema(self, source: Any, decay: float) -> None:
        self.asked.append(f"follow with {decay}")

    def save(self, folder: Path) -> None:
        (folder / "parameters").write_text(str(len(self.trained)))

    def load(self, folder: Path) -> None:
        self.asked.append(f"load {(folder / 'parameters').read_text()}")

    def export(self, folder: Path) -> None:
        self.asked.append(f"export {folder.name.strip('.').removesuffix('.new')}")
        folder.mkdir()
        (folder / "weights").write_text(str(len(self.trained)))

    # The algorithm.

    def prepare(self, batch: PackedBatch, context: Any) -> PackedBatch:
        self.asked.append(f"prepare for {context.updates}")
        context.log("prepared", Metric.sum(1.0))
        context.state["batches"] = context.state.get("batches", torch.zeros(())) + 1
        return batch

    def updates(self, batch: PackedBatch, context: Any) -> Iterator[list[LossSpec]]:
        for minibatch in context.minibatches(batch):
            yield [LossSpec(role, minibatch, ("logprobs",), self.loss) for role in self.learns]

    def loss(self, batch: PackedBatch, outputs: Any) -> LossResult:
        counted = {"tokens": Metric.sum(float(batch.token_count)), "longest": Metric.maximum(batch.lengths)}
        return LossResult(torch.zeros(()), counted)

    # The weight sync.

    def begin(self, version: int, trained: int) -> None:
        self.asked.append(f"begin {version} after {trained}")

    def sync(self, trained: int) -> int:
        self.asked.append(f"sync {trained}")
        self.version = trained + 100
        return self.version

    def skip(self, trained: int) -> None:
        self.asked.append(f"skip {trained}")

    def offer_folder(self) -> None:
        self.asked.append("offer folder")

    def check_logprobs(self, dtype: str) -> dict[str, float]:
        assert dtype == "float32"
        return {}

    def finish(self) -> None:
        self.asked.append("synced")

    def sleep(self) -> None:
        self.asked.append("release memory")


def config(steps: int = 3, **changes: Any) -> Any:
    """Return the parts of a run's config that the loop reads."""
    sections = {
        "seed": 0,
        "steps": steps,
        "training": TrainingSection(),
        "checkpoint": CheckpointSection(),
        "evaluation": None,
        "evaluates_beside_training": True,
        "takes_turns": False,
        "model": SimpleNamespace(dtype="float32"),
    }
    return SimpleNamespace(**sections | changes)


def train(
    folder: Path,
    parts: Any,
    settings: Any,
    state: TrainerState | None = None,
    log: Callable[[str], None] = lambda _: None,
    hooks: Sequence[Any] = (),
    on_note: Callable[[int, str], None] = lambda *_: None,
    **others: Role,
) -> bool:
    folder.mkdir(exist_ok=True)
    state = state or TrainerState()
    written = state.step - (state.unevaluated is not None)
    metrics_logger = MetricsLogger(
        folder / "metrics.jsonl", written, phase=lambda _: nullcontext(), log=log, hooks=hooks, on_note=on_note
    )
    roles = {"actor": ACTOR, **others}
    engines = dict.fromkeys(roles, parts)
    learner = Learner(settings, parts, roles, engines)
    source, checkpoints = SharedSource(parts, read), folder / "attempts/1/checkpoints"
    trainer = Trainer(settings, learner, parts, folder, checkpoints, source, metrics_logger, state)
    return trainer.run(0)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
