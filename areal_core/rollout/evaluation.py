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
        row: of the data set.
        sample: which of the answers to its prompt.
        episode: None where it failed.
        error: why it failed; empty where it did not.
        facts: what else was recorded of it.
    """

    row: int
    sample: int
    episode: Episode | None
    error: str = ""
    facts: Mapping[str, Any] = {}


async def play_in_workers(
    runner: RolloutWorkers, sampling: SamplingParameters, row: int, sample: int, timeout_s: float
) -> Played:
    """Play an episode as a group of one, with the same seeds each time.

    The trainer syncs nothing while an evaluation runs, so all of its tokens are of one weight version.

    Args:
        runner: runs prompt groups.
        sampling: of the evaluation; its own temperature, for example.
        row: of the held-out data.
        sample: which of the answers to its prompt.
        timeout_s: that it may take.
    """
    # An epoch of its own: evaluation and training never share random numbers.
    ended = await runner.run(RunGroup(-1 - row, row, -1, (sample,), sampling, True, timeout_s))
    if not ended.packed:
        return Played(row, sample, None, ended.facts.failure)
    (shown,) = ended.facts.shown
    said = dict(shown.rewards), shown.text, dict(ended.facts.metrics)
    return Played(row, sample, Episode(packing.unpack(packing.from_bytes(ended.packed)), shown.reward, *said))


class Evaluator:
    """Plays the same held-out prompts each time.

    Args:
        play_one: plays one episode to its end, given its row, its sample, and the seconds that it may take.
        rows: how many held-out rows there are.
        section: how many rows and answers.
    """

    def __init__(
        self, play_one: Callable[[int, int, float], Awaitable[Played]], rows: int, section: EvaluationSection
    ) -> None:
        self._play_one = play_one
        self._samples = section.samples_per_prompt
        self._rows = min(rows, section.limit or rows)
        self.progress = ""
        """How far the evaluation is that runs now, in words; empty where none does."""
        self.on_failure: Callable[[str], None] = lambda _: None
        """Told in words when episodes of an evaluation have failed."""

    @property
    def episodes(self) -> int:
        """How many there are."""
        return self._rows * self._samples

    async def play(self, take: Callable[[Played], None], rollout: RolloutSection) -> None:
        """Run all episodes, as many at a time and each under the same deadline as those of training.

        Args:
            take: given each episode when it has ended.
            rollout: how a run generates.

        Raises:
            RunError: the engine died, the first `rollout.max_consecutive_failures` episodes all failed, or none ended
                for `rollout.stall_timeout_s`.
        """
        ended = failed = 0
        loop, places = asyncio.get_running_loop(), itertools.product(range(self._rows), range(self._samples))
        width = min(rollout.episodes_at_once, self.episodes)

        async def work() -> None:
            """Take one place after another until there are no more."""
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
        finally:  # nobody goes on behind the first cause
            self.progress = ""
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def run(self, rollout: RolloutSection) -> dict[str, float]:
        """Mean reward, its components and lengths over all episodes; failed episodes are counted, not scored.

        Args:
            rollout: how a run generates.

        Raises:
            RunError: as `play`.
        """
        played: list[Played] = []
        await self.play(played.append, rollout)
        # Ended in any order: sums are made in one, so that equal evaluations give equal figures.
        finished = [each.episode for each in sorted(played, key=lambda p: p[:2]) if each.episode is not None]
        metrics = {"episodes": float(len(finished)), "failed": float(len(played) - len(finished))}
        if failures := [each for each in played if each.episode is None]:
            first = min(failures, key=lambda each: (each.row, each.sample))
            count = f"{len(failures)} of {len(played)} episodes"
            self.on_failure(f"{count} of the evaluation failed; the first: {first.error.strip()}")
        named: dict[str, list[float]] = defaultdict(list)
        for episode in finished:
            length = sum(int(t.tokens["loss_mask"].sum()) for t in episode.trajectories)
            said = {**episode.metrics, **{f"reward/{name}": value for name, value in episode.rewards.items()}}
            for name, value in {**said, "reward": episode.reward, "response_length": float(length)}.items():
                named[name].append(value)
        # A reward may abstain, and its mean is over what it judged; a metric that an episode lacks counts as 0.
        for key, values in named.items():
            metrics[key] = math.fsum(values) / (len(values) if key.startswith("reward/") else len(finished))
        return {f"evaluation/{name}": value for name, value in metrics.items()}
