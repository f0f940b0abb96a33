"""Which half is the bottleneck, and the better split: against simulated pipelines in which both are known."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.config.sections import PlacementSection
from areal_core.diagnostics.balance import STEPS, Balance, Split, bottleneck
from areal_core.diagnostics.conditions import Diagnostics


def simulate(split: Split, generation: float, training: float, steps: int = 40, ahead: int = 2) -> list[dict[str, Any]]:
    """The metrics of a run whose batches cost so many GPU-seconds on either side.

    Generation begins a batch as soon as no more than `ahead` are unfinished, trained ones left out; training begins
    one when it is there and the last is done.
    """
    ready: list[float] = []
    begun: list[float] = []
    lines, done, last_ready = [], deque([0.0] * ahead), 0.0
    for step in range(steps):
        idle_until = max(last_ready, done.popleft())
        begun.append(idle_until - last_ready)
        last_ready = idle_until + generation / split.generation
        ready.append(last_ready)
        before = done[-1]
        began = max(before, last_ready)
        done.append(began + training / split.training)
        lines.append(
            {
                "step": step + 1,
                "time/step_s": done[-1] - before,
                "time/wait_s": began - before,
                "time/generation_idle_s": begun[-1],
            }
        )
    return lines


def seconds(lines: list[dict[str, Any]]) -> float:
    return sum(line["time/step_s"] for line in lines[-STEPS:]) / STEPS


@pytest.mark.parametrize("server", [1, 2])
@pytest.mark.parametrize("costs", [(30.0, 10.0), (10.0, 30.0), (8.0, 8.0), (100.0, 7.0), (3.0, 40.0)])
@pytest.mark.parametrize("generation", [2, 4, 6])
def test_what_is_foretold_of_a_split_is_what_it_brings(
    generation: int, costs: tuple[float, float], server: int
) -> None:
    now = Split(generation, 8 - generation, server)
    balance = Balance.of(simulate(now, *costs))
    assert balance is not None
    for other in now.others():
        assert balance.seconds(now, other) == pytest.approx(seconds(simulate(other, *costs)))
        assert other.generation % server == 0
        assert other.generation + other.training == 8


def test_generation_is_the_bottleneck() -> None:
    words = bottleneck(simulate(Split(4, 4), 30, 10), Split(4, 4))
    assert words.startswith(
        "generation is the bottleneck: the trainer waits 67% of the time; with 6 GPUs that generate"
    )
    assert "a step would take about 5 s and not 7.5" in words


def test_the_agents_own_time_is_the_bottleneck() -> None:
    agents = {"agents/elsewhere_s": 3.3, "agents/generating_s": 1.2}
    lines = [{**line, **agents} for line in simulate(Split(4, 4), 30, 10)]
    words = bottleneck(lines, Split(4, 4))
    assert words.startswith("the agents' own time is the bottleneck: the trainer waits 67% of the time, and 73%")
    assert "rollout.workers" in words
    assert "GPUs" not in words
    quick = [{**line, **agents, "agents/elsewhere_s": 1.0} for line in simulate(Split(4, 4), 30, 10)]
    assert bottleneck(quick, Split(4, 4)).startswith("generation is the bottleneck")


def test_training_is_the_bottleneck() -> None:
    words = bottleneck(simulate(Split(4, 4), 10, 30), Split(4, 4))
    assert words.startswith("training is the bottleneck: for 67% of the time there is nothing to generate; with 2 GPUs")


def test_no_split_is_proposed_that_brings_little() -> None:
    assert "no other split of these 2 GPUs would be much quicker" in bottleneck(
        simulate(Split(1, 1), 9, 3), Split(1, 1)
    )
    assert bottleneck(simulate(Split(4, 4), 20, 20), Split(4, 4)) == "", "nobody waits"
    assert bottleneck(simulate(Split(1, 1), 9, 3), None) == "", "no GPUs to split, and colocated halves alternate"


def test_odd_steps_and_first_steps_do_not_count() -> None:
    lines = simulate(Split(4, 4), 20, 20)
    odd = {"time/step_s": 90.0, "time/wait_s": 80.0, "time/generation_idle_s": 0.0, "time/evaluate_s": 3.0}
    assert bottleneck([*lines, odd], Split(4, 4)) == ""
    assert bottleneck(simulate(Split(4, 4), 30, 10)[: 2 * STEPS - 1], Split(4, 4)) == ""
    assert bottleneck([{"time/step_s": 1.0, "time/wait_s": 0.9}] * 50, Split(4, 4)) == "", (
        "fine-tuning generates nothing"
    )


def test_a_run_says_it_once() -> None:
    for split, count in ((Split(4, 4), 1), (None, 0)):
        diagnostics = Diagnostics(split)
        told = [words for line in simulate(Split(4, 4), 30, 10) for words in diagnostics.add(line)]
        assert len(told) == count


def test_the_split_of_a_config() -> None:
    def of(generation: list[int] | None, training: list[int] | None, **keywords: int) -> Split | None:
        placement = PlacementSection(generation=generation, training=training)
        engine = SimpleNamespace(keywords=lambda: keywords)
        config: Any = SimpleNamespace(placement=placement, inference_engine=engine)
        return Split.of(config)

    assert of([0, 1], [2, 3, 4], tensor_parallel=2) == Split(2, 3, 2)
    assert of([0], [1]) == Split(1, 1)
    assert of([0], [0]) is None, "shared"
    assert of([0, 0], [1]) is None, "other splits would not have as many servers"
    assert of(None, [0]) is None


def test_halves_that_wait_for_one_another_are_no_matter_of_gpus() -> None:
    """As with a bound on staleness of 0: a step generates, then trains."""
    line = {"time/step_s": 10.0, "time/wait_s": 5.0, "time/generation_idle_s": 4.5}
    told = bottleneck([line] * 20, Split(4, 4))
    assert told.startswith("generation and training wait for one another: the trainer for 50% of the time")
    assert "GPUs" not in told
    long = {**line, "time/wait_s": 0.0, "time/generation_idle_s": 60.0}
    assert "for 100% of the time there is nothing" in bottleneck([long] * 20, Split(4, 4))
    assert bottleneck([line] * 20, None) == "", "colocated halves cannot overlap"
