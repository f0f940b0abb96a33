"""Evaluation: episodes over held-out prompts, scored and averaged, at one weight version."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from areal_core.rollout.episodes import EpisodeError

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.config.sections import EvaluationSection
    from areal_core.data.trajectory import Episode
    from areal_core.interfaces.dataset import Dataset
    from areal_core.interfaces.inference import SamplingParameters
    from areal_core.rollout.episodes import EpisodeRunner


class Played(NamedTuple):
    """An episode of an evaluation that has ended.

    Attributes:
        row: of the data set.
        sample: which of the answers to its prompt.
        episode: None where it failed.
        error: why it failed; empty where it did not.
    """

    row: int
    sample: int
    episode: Episode | None
    error: str = ""


class Evaluator:
    """Runs the same held-out prompts each time, with the same seeds.

    The trainer publishes nothing while an evaluation runs, so all of its tokens are of one weight version.

    Args:
        runner: runs episodes.
        dataset: held-out rows.
        section: how many rows and answers.
        sampling: of the evaluation; its own temperature, for example.
    """

    def __init__(
        self, runner: EpisodeRunner, dataset: Dataset, section: EvaluationSection, sampling: SamplingParameters
    ) -> None:
        self._runner = runner
        self._dataset = dataset
        self._sampling = sampling
        self._samples = section.samples_per_prompt
        self._rows = min(len(dataset), section.limit or len(dataset))
        self.on_failure: Callable[[str], None] = lambda _: None
        """Told in words when episodes of an evaluation have failed."""

    @property
    def episodes(self) -> int:
        """How many there are."""
        return self._rows * self._samples

    async def play(self, take: Callable[[Played], None], *, at_once: int, timeout_s: float | None = None) -> None:
        """Run all episodes.

        Args:
            take: given each episode when it has ended.
            at_once: episodes under way at a time.
            timeout_s: of one episode.
        """
        places = itertools.product(range(self._rows), range(self._samples))

        async def work() -> None:
            """Take one place after another until there are no more."""
            for row, sample in places:
                try:
                    async with asyncio.timeout(timeout_s):
                        take(Played(row, sample, await self._episode(row, sample)))
                except TimeoutError:
                    take(Played(row, sample, None, f"longer than rollout.episode_timeout_s: {timeout_s:g}"))
                except EpisodeError as error:
                    take(Played(row, sample, None, str(error)))

        await asyncio.gather(*(work() for _ in range(min(at_once, self.episodes))))

    async def run(self, timeout_s: float | None = None) -> dict[str, float]:
        """Mean reward, its components and lengths over all episodes; failed episodes are counted, not scored.

        Args:
            timeout_s: of one episode.
        """
        played: list[Played] = []
        await self.play(played.append, at_once=self.episodes, timeout_s=timeout_s)
        # Ended in any order: sums are made in one, so that equal evaluations give equal figures.
        finished = [episode for _, _, episode, _ in sorted(played, key=lambda p: p[:2]) if episode is not None]
        metrics = {"episodes": float(len(finished)), "failed": float(len(played) - len(finished))}
        if failures := [each for each in played if each.episode is None]:
            first = min(failures, key=lambda each: (each.row, each.sample))
            count = f"{len(failures)} of {len(played)} episodes"
            self.on_failure(f"{count} of the evaluation failed; the first: {first.error.strip()}")
        named: dict[str, list[float]] = defaultdict(list)
        for episode in finished:
            named["reward"].append(episode.reward)
            named["response_length"].append(float(sum(int(t.tokens["loss_mask"].sum()) for t in episode.trajectories)))
            for name, value in episode.rewards.items():
                named[f"reward/{name}"].append(value)
        metrics |= {name: statistics.fmean(values) for name, values in named.items()}
        return {f"evaluation/{name}": value for name, value in metrics.items()}

    async def _episode(self, row: int, sample: int) -> Episode:
        return await self._runner.run(
            self._dataset[row],
            (row, -1),  # an epoch of its own: evaluation and training never share random numbers
            group=-1 - row,
            sample_index=sample,
            sampling=self._sampling,
            is_evaluation=True,
        )
