"""Evaluation: episodes over held-out prompts, scored and averaged, at one weight version."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from areal_core.data import packing
from areal_core.data.trajectory import Episode
from areal_core.errors import RunError
from areal_core.messages.workflows import RunGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from areal_core.config.sections import EvaluationSection, RolloutSection
    from areal_core.interfaces.inference import SamplingParameters
    from areal_core.rollout.workers import RolloutWorkers


class Played(NamedTuple):
    """An episode of an evaluation that has ended.

    Attributes:
        row: number of the row in the data set.
        sample: number of the answer to its prompt, from 0.
        episode: None if it failed.
        error: the reason; empty if it did not fail.
        facts: further fields of the record.
    """

    row: int
    sample: int
    episode: Episode | None
    error: str = ""
    facts: Mapping[str, Any] = {}


async def play_in_workers(
    runner: RolloutWorkers, sampling: SamplingParameters, row: int, sample: int, timeout_s: float
) -> Played:
    """Play an episode as a group of one, with the same seeds in each evaluation.

    The trainer syncs no weights while an evaluation runs, so that all tokens have one weight version.

    Args:
        runner: runs prompt groups.
        sampling: parameters of the evaluation, with its own temperature for example.
        row: number of the row in the held-out data.
        sample: number of the answer to its prompt, from 0.
        timeout_s: seconds that the episode may take.
    """
    # Epoch -1: evaluation and training never share random numbers.
    ended = await runner.run(RunGroup(-1 - row, row, -1, (sample,), sampling, True, timeout_s))
    if not ended.packed:
        return Played(row, sample, None, ended.outcome.failure)
    (shown,) = ended.outcome.shown
    trajectories = packing.unpack(packing.from_bytes(ended.packed))
    episode = Episode(trajectories, shown.reward, dict(shown.rewards), shown.text, dict(ended.outcome.metrics))
    return Played(row, sample, episode)


class Evaluator:
    """Plays the episodes of the same held-out prompts in each evaluation.

    Args:
        play_one: plays one episode, given its row, its sample and its deadline in seconds.
        rows: number of held-out rows.
        section: `evaluation` of the config.

    Example:
        >>> import asyncio
        >>> from areal_core.config import resolve
        >>> from areal_core.data import Episode, FinishReason, Generation, Trajectory
        >>> from areal_core.programs import Evaluator, Played
        >>> async def play_one(row: int, sample: int, timeout_s: float) -> Played:
        ...     answer = Generation([7, 2], [-0.1, -0.2], [0, 0], FinishReason.STOP)
        ...     trajectory = Trajectory.from_generation([5], answer)
        ...     return Played(row, sample, Episode([trajectory], reward=float(row)))
        >>> config = resolve("grpo/addition", overrides=["evaluation.samples_per_prompt=2"]).config
        >>> evaluator = Evaluator(play_one, rows=3, section=config.evaluation)
        >>> metrics = asyncio.run(evaluator.run(config.rollout))
        >>> metrics["evaluation/episodes"], metrics["evaluation/reward"], metrics["evaluation/response_length"]
        (6.0, 1.0, 2.0)
    """

    def __init__(
        self, play_one: Callable[[int, int, float], Awaitable[Played]], rows: int, section: EvaluationSection
    ) -> None:
        self._play_one = play_one
        self._samples = section.samples_per_prompt
        self._rows = min(rows, section.limit or rows)
        self.progress = ""
        """Progress of the running evaluation in words; empty if none runs."""
        self.on_failure: Callable[[str], None] = lambda _: None
        """Called with a message if episodes of an evaluation have failed."""

    @property
    def episodes(self) -> int:
        """Number of episodes in an evaluation."""
        return self._rows * self._samples

    async def play(self, take: Callable[[Played], None], rollout: RolloutSection) -> None:
        """Run all episodes, with the concurrency and the deadline of training's.

        Args:
            take: called with each episode that has ended.
            rollout: `rollout` of the config.

        Raises:
            RunError: the engine died, the first `rollout.max_consecutive_failures` episodes all failed, or none ended
                for `rollout.stall_timeout_s`.
        """
        ended = failed = 0
        loop, places = asyncio.get_running_loop(), itertools.product(range(self._rows), range(self._samples))
        width = min(rollout.episodes_at_once, self.episodes)

        async def work() -> None:
            """Play one episode after another until none is left."""
            nonlocal ended, failed
            for row, sample in places:
                played = await self._play_one(row, sample, rollout.episode_timeout_s)
                take(played)
                ended, failed = ended + 1, failed + (played.episode is None)
                self.progress = f"{ended} of {self.episodes} episodes of the evaluation ended, {failed} failed"
                if failed == ended == rollout.max_consecutive_failures:
                    raise RunError(f"{self.progress}: rollout.max_consecutive_failures; the last:\n{played.error}")
                stall.reschedule(loop.time() + rollout.stall_timeout_s)

        workers = [asyncio.ensure_future(work()) for _ in range(width)]
        try:
            async with asyncio.timeout(rollout.stall_timeout_s) as stall:
                await asyncio.gather(*workers)
        except TimeoutError:
            raise RunError(
                f"no episode of the evaluation ended within rollout.stall_timeout_s: {rollout.stall_timeout_s:g}; "
                "those that wait for a slot of a server have no other deadline"
            ) from None
        finally:  # the first error stops all episodes
            self.progress = ""
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def run(self, rollout: RolloutSection) -> dict[str, float]:
        """Return means over all episodes of reward, its components and lengths; failed episodes are only counted.

        Args:
            rollout: `rollout` of the config.

        Raises:
            RunError: see `play`.
        """
        played: list[Played] = []
        await self.play(played.append, rollout)
        # Episodes end in any order. Sums have a fixed one, so that equal evaluations give equal figures.
        finished = [each.episode for each in sorted(played, key=lambda p: p[:2]) if each.episode is not None]
        metrics = {"episodes": float(len(finished)), "failed": float(len(played) - len(finished))}
        if failures := [each for each in played if each.episode is None]:
            first = min(failures, key=lambda each: (each.row, each.sample))
            count = f"{len(failures)} of {len(played)} episodes"
            self.on_failure(f"{count} of the evaluation failed; the first: {first.error.strip()}")
        named: dict[str, list[float]] = defaultdict(list)
        for episode in finished:
            length = sum(int(t.tokens["loss_mask"].sum()) for t in episode.trajectories)
            values = {**episode.metrics, **{f"reward/{name}": value for name, value in episode.rewards.items()}}
            for name, value in {**values, "reward": episode.reward, "response_length": float(length)}.items():
                named[name].append(value)
        # The mean of a reward is over the answers that it scored. A metric that an episode lacks counts as 0.
        for name, numbers in named.items():
            metrics[name] = math.fsum(numbers) / (len(numbers) if name.startswith("reward/") else len(finished))
        return {f"evaluation/{name}": value for name, value in metrics.items()}
