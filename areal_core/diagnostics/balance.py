"""Which half of a run the other one waits for, and the split of the GPUs at hand that would balance them.

In a step of s seconds the trainer waits w for a batch, and generation has nothing under way for i. With g GPUs that
generate and t that train, a batch costs

    G = g (s - i)    GPU-seconds of generation
    T = t (s - w)    GPU-seconds of training, weight sync and all else that the trainer does

With g' and t' GPUs a step takes max(G / g', T / t') where both halves overlap and scale with their GPUs; of n in all
that is least, (G + T) / n, at g' = n G / (G + T), or at a whole number beside it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.config import RunConfig

STEPS: Final = 5
"""Consecutive steps that a finding needs, after as many in which everything warms up."""
NOTABLE: Final = 0.1
"""Share of a step that waiting, or a better split, must come to before it is told of."""
NEEDED: Final = ("time/step_s", "time/wait_s", "time/generation_idle_s")
EPISODES: Final = ("agents/elsewhere_s", "agents/generating_s")


def whole_steps(lines: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return up to `count` of the latest steps that had neither an evaluation nor a checkpoint, the latest first."""
    whole = (
        line
        for line in reversed(lines)
        if all(key in line for key in NEEDED) and not {"time/evaluate_s", "time/checkpoint_s"} & line.keys()
    )
    return list(islice(whole, count))


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs that generate and GPUs that train, apart from one another.

    Attributes:
        generation, training: how many.
        server: GPUs of one inference server; only whole servers generate.
    """

    generation: int
    training: int
    server: int = 1

    @classmethod
    def of(cls, config: RunConfig) -> Split | None:
        """What a config says; None where it does not name both kinds, or some have several uses."""
        placement = config.placement
        has_own = placement.disaggregated and not placement.servers_share_gpus
        if not (has_own and placement.generation and placement.training and config.inference_engine):
            return None
        server = config.inference_engine.keywords().get("tensor_parallel", 1)
        return cls(len(placement.generation), len(placement.training), server)

    def others(self) -> list[Split]:
        """All splits of as many GPUs into whole servers and at least one that trains, this one among them."""
        total = self.generation + self.training
        sizes = {*range(self.server, total, self.server), self.generation}
        return [Split(generation, total - generation, self.server) for generation in sorted(sizes)]


@dataclass(frozen=True, slots=True)
class Balance:
    """Means over some steps, in seconds.

    Attributes:
        step: a whole step.
        waited: the part in which the trainer waited for a batch.
        idle: the part in which no episode was under way.
        elsewhere: share of an episode in which its agent did not wait for the policy.
    """

    step: float
    waited: float
    idle: float
    elsewhere: float = 0.0

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Balance | None:
        """Of the last steps without an evaluation and without a checkpoint; None where there are too few."""
        latest = whole_steps(lines, 2 * STEPS)
        if len(latest) < 2 * STEPS:
            return None
        # A long idle time may have begun before its step did.
        last, whole_s = latest[:STEPS], NEEDED[0]
        step, waited, idle = (statistics.fmean(min(line[key], line[whole_s]) for line in last) for key in NEEDED)
        own, generating = (sum(line.get(key, 0.0) for line in last) for key in EPISODES)
        return cls(step, waited, idle, own / (own + generating) if own else 0.0)

    def seconds(self, now: Split, then: Split) -> float:
        """Of a step with another split, by the formula above."""
        generating = now.generation * max(0.0, self.step - self.idle)
        training = now.training * max(0.0, self.step - self.waited)
        return max(generating / then.generation, training / then.training)

    def describe(self, now: Split) -> str:
        """Which half is the bottleneck and what would balance them, in words; nothing where neither waits."""
        share, other = self.waited / self.step, self.idle / self.step
        if max(share, other) < NOTABLE:
            return ""
        if min(share, other) >= NOTABLE:
            return (
                f"generation and training wait for one another: the trainer for {share:.0%} of the time, and for "
                f"{other:.0%} there is nothing to generate; raise max_staleness or max_pending_batches of rollout, so "
                "that they overlap"
            )
        if share >= other and self.elsewhere > 0.5:
            return (
                f"the agents' own time is the bottleneck: the trainer waits {share:.0%} of the time, and "
                f"{self.elsewhere:.0%} of an episode's passes outside the policy (agents/elsewhere_s); raise "
                "rollout.workers, have more episodes at once (rollout.max_pending_batches), make clients once for all"
            )
        if share >= other:
            message = f"generation is the bottleneck: the trainer waits {share:.0%} of the time"
        else:
            message = f"training is the bottleneck: for {other:.0%} of the time there is nothing to generate"
        return f"{message}; {self._advice(now)}"

    def _advice(self, now: Split) -> str:
        best = min(now.others(), key=lambda split: self.seconds(now, split))
        seconds = self.seconds(now, best)
        as_it_is = self.seconds(now, now)
        if seconds > (1 - NOTABLE) * as_it_is:
            return f"no other split of these {now.generation + now.training} GPUs would be much quicker"
        return (
            f"with {best.generation} GPUs that generate and {best.training} that train, not {now.generation} and "
            f"{now.training}, a step would take about {seconds:.3g} s and not {as_it_is:.3g}, where both scale with "
            "their GPUs (placement.generation, placement.training)"
        )


def bottleneck(lines: Sequence[Mapping[str, Any]], now: Split | None) -> str:
    """Return what `Balance.describe` says of these steps; nothing if they are too few.

    A run without a split gets nothing either: colocated halves alternate, and each waits for the other one by design.
    """
    balance = Balance.of(lines) if now is not None else None
    return "" if balance is None or now is None else balance.describe(now)
