"""Evaluations: what fails is told."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from areal_core.interfaces import SamplingParameters
from areal_core.rollout.episodes import EpisodeRunner
from areal_core.rollout.evaluation import Evaluator


class Broken:
    async def run_episode(self, row, context):
        raise ValueError(f"no answer to {row['prompt']}")


def test_episodes_of_an_evaluation_that_fail_are_told_with_the_first_cause():
    told: list[str] = []
    section = SimpleNamespace(samples_per_prompt=2, limit=None)
    runner = EpisodeRunner(Broken(), engine=None, scorer=None, tokenizer=None)
    evaluator = Evaluator(runner, [{"prompt": "a"}, {"prompt": "b"}], section, SamplingParameters())
    evaluator.on_failure = told.append
    metrics = asyncio.run(evaluator.run())
    assert metrics == {"evaluation/episodes": 0.0, "evaluation/failed": 4.0}
    (line,) = told
    assert line.startswith("4 of 4 episodes of the evaluation failed; the first: ")
    assert "no answer to a" in line
