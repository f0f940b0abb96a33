"""What the metrics of an asynchronous run say of a synchronous one, against synchronous runs of the true controller."""

from __future__ import annotations

import asyncio
import random
import statistics
from typing import TYPE_CHECKING, Any

import pytest

from areal_core.config.sections import RolloutSection
from areal_core.diagnostics.conditions import Diagnostics
from areal_core.diagnostics.overlap import Overlap
from areal_core.engines import WeightUpdate
from areal_testing.fakes import FakeEngine
from areal_testing.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STEPS = 105
MANY = 1 << 20


class Uneven(FakeEngine):
    """Answers take 0.2 to 0.6 seconds, and one of ten takes two."""

    async def draw(self, request: Any, version: int) -> Any:
        chance = random.Random(request.seed)
        await asyncio.sleep(2.0 if chance.random() < 0.1 else chance.uniform(0.2, 0.6))
        return await super().draw(request, version)


def simulate(
    folder: Path,
    build: Callable[..., Any],
    *,
    staleness: int,
    pending: int,
    training_s: float,
    places: int = MANY,
    stale: str = "keep",
    steps: int = STEPS,
) -> list[dict[str, Any]]:
    """The metrics of a run whose training takes so long, and whose stale samples are worth 95% of fresh ones."""
    lines: list[dict[str, Any]] = []

    async def run() -> None:
        engine = Uneven(places=places)
        controller, _ = build(folder, engine=engine, max_staleness=staleness, depth=pending, stale=stale)
        now = asyncio.get_running_loop().time
        controller.start()
        for step in range(steps):
            began = now()
            _, metrics = await controller.next_batch(step)
            waited = now() - began
            await asyncio.sleep(training_s)
            await controller.sync(WeightUpdate(step + 1, folder), step + 1)
            worth = {"train/effective_sample_share": 0.95 if metrics["staleness/max"] else 1.0}
            lines.append({**metrics, **worth, "time/step_s": now() - began, "time/wait_s": waited})
        await controller.close()

    run_virtually(asyncio.wait_for(run(), 10_000))
    return lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pending", "training_s", "places", "stale"),
    [
        (1, 0.05, 8, "keep"),
        (1, 1.0, 2, "keep"),
        (2, 0.05, 2, "keep"),  # full servers
        (2, 0.05, MANY, "keep"),  # never full
        (2, 1.0, 8, "drop"),
    ],
)
def test_a_synchronous_step_takes_at_most_what_an_asynchronous_run_says(
    tmp_path: Path, build: Callable[..., Any], pending: int, training_s: float, places: int, stale: str
) -> None:
    timing: dict[str, Any] = {"pending": pending, "training_s": training_s, "places": places, "stale": stale}
    lines = simulate(tmp_path / "asynchronous", build, staleness=1, **timing)
    bounds = [Overlap.of(lines[:end], False, 1.0) for end in range(15, STEPS + 1, 10)]
    bound = statistics.fmean(overlap.synchronous for overlap in bounds if overlap is not None)
    synchronous = simulate(tmp_path / "synchronous", build, staleness=0, **timing)[5:]
    measured = statistics.fmean(line["time/step_s"] for line in synchronous)
    assert measured < 1.01 * bound, "which batches share a window differs by one"
    if pending == 1:
        assert measured == pytest.approx(bound, rel=0.01), "nothing is generated beside another batch"


@pytest.mark.parametrize(
    ("training_s", "pending", "staleness", "is_reported"),
    [
        (0.05, 1, 1, True),  # training is negligible, and one batch at a time is generated
        (1.0, 1, 1, False),  # training hides behind generation
        (0.05, 2, 1, False),  # two batches at a time take as long as one
        (0.05, 1, 0, False),  # synchronous
        (100.0, 2, 1, True),  # generation is negligible
    ],
)
def test_a_run_reports_once_that_asynchrony_gains_less_than_it_costs(
    tmp_path: Path, build: Callable[..., Any], training_s: float, pending: int, staleness: int, is_reported: bool
) -> None:
    lines = simulate(tmp_path, build, staleness=staleness, pending=pending, training_s=training_s, steps=40)
    diagnostics = Diagnostics(None, RolloutSection(batch_size=4, group_size=2, max_staleness=staleness))
    texts = [text for line in lines for text in diagnostics.add(line) if "asynchrony" in text]
    assert len(texts) == is_reported
    assert all("are worth 95.0% of fresh ones" in text for text in texts)


def test_what_is_not_measured_is_not_judged() -> None:
    line = {"time/step_s": 1.0, "time/wait_s": 0.9, "time/generation_idle_s": 0.0, "time/batch_generation_s": 0.9}
    worth = {"train/effective_sample_share": 0.5, "staleness/max": 1.0}
    fresh = {"train/effective_sample_share": 1.0, "staleness/max": 0.0}

    def reported(*lines: dict[str, float]) -> bool:
        diagnostics = Diagnostics(None, RolloutSection())
        return any("asynchrony" in text for one in lines for text in diagnostics.add(one))

    stale = {**line, **worth}
    assert reported({**line, **fresh}, *[stale] * 15)
    assert not reported(*[stale] * 30), "no batch was fresh: the engines may differ by as much"
    assert not reported({**line, **fresh}, *[line] * 30), "an algorithm without importance weights"
    assert not reported({**line, **fresh}, *[{**stale, "time/checkpoint_s": 1.0}] * 30), "steps that were disturbed"
    masked = {"staleness/tokens_over_bound": 30.0, "batch/sampled_tokens": 70.0}
    overlap = Overlap.of([{**stale, **masked}] * 15, True, 1.0)
    assert overlap is not None
    assert overlap.worth == pytest.approx(0.35)
