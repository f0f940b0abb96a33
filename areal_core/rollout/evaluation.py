"""Evaluation: episodes over held-out prompts, scored and averaged, at one weight version."""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING

from areal_core.rollout.episodes import EpisodeError

if TYPE_CHECKING:
    from areal_core.data.trajectory import Episode
    from areal_core.interfaces.dataset import Dataset
    from areal_core.interfaces.inference import SamplingParameters
    from areal_core.rollout.episodes import EpisodeRunner


class Evaluator:
    """Runs the same held-out prompts each time, with the same seeds.

    The trainer publishes nothing while an evaluation runs, so all of its tokens are of one weight version.

    Args:
        runner: runs episodes.
        dataset: held-out rows.
        sampling: of the evaluation; its own temperature, for example.
        samples_per_prompt: episodes for each row.
        limit: rows to use, from the first; None for all.
    """

    def __init__(
        self,
        runner: EpisodeRunner,
        dataset: Dataset,
        sampling: SamplingParameters,
        *,
        samples_per_prompt: int = 1,
        limit: int | None = None,
    ) -> None:
        self._runner = runner
        self._dataset = dataset
        self._sampling = sampling
        self._samples = samples_per_prompt
        self._rows = len(dataset) if limit is None else min(limit, len(dataset))

    async def run(self) -> dict[str, float]:
        """Mean reward, its components and lengths over all episodes; failed episodes are counted, not scored."""
        episodes = await asyncio.gather(
            *(self._episode(row, sample) for row in range(self._rows) for sample in range(self._samples))
        )
        finished = [episode for episode in episodes if episode is not None]
        metrics = {"evaluation/episodes": float(len(finished)), "evaluation/failed": float(episodes.count(None))}
        if not finished:
            return metrics
        named: dict[str, list[float]] = defaultdict(list)
        for episode in finished:
            named["reward"].append(episode.reward)
            named["response_length"].append(float(sum(int(t.tokens["loss_mask"].sum()) for t in episode.trajectories)))
            for name, value in episode.rewards.items():
                named[f"reward/{name}"].append(value)
        return metrics | {f"evaluation/{name}": statistics.fmean(values) for name, values in named.items()}

    async def _episode(self, row: int, sample: int) -> Episode | None:
        try:
            return await self._runner.run(
                self._dataset[row],
                (row, -1),  # an epoch of its own: evaluation and training never share random numbers
                group=-1 - row,
                sample_index=sample,
                sampling=self._sampling,
                is_evaluation=True,
            )
        except EpisodeError:
            return None
