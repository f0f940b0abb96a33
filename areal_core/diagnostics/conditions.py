"""The conditions of a run's metrics that are known to go wrong, each with what to try."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from areal_core.diagnostics.balance import STEPS, Split, bottleneck
from areal_core.diagnostics.overlap import WORTH, Overlap

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.config.sections import RolloutSection

KEPT_STEPS: Final = 200
"""Steps that are kept for the balance of GPUs, which leaves out those with an evaluation or a checkpoint."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that is known to go wrong.

    Attributes:
        holds: whether it does. Takes the steps that a run began with and its last ones, as functions from a metric's
            name to its values; the second one takes a number of steps as well.
        words: what it is, and what to try; `{NAME}` is the last value of a metric, its slashes as underscores.
    """

    holds: Callable[[Callable[[str], Sequence[float]], Callable[..., Sequence[float]]], bool]
    words: str


def _above(values: Sequence[float], limit: float, steps: int = STEPS) -> bool:
    return len(values) == steps and min(values) > limit


def _below(values: Sequence[float], limit: float, steps: int = STEPS) -> bool:
    return len(values) == steps and max(values) < limit


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _stands_still(first: Callable[..., Sequence[float]], last: Callable[..., Sequence[float]]) -> bool:
    """Whether rewards have not risen: where they have, a policy that is sure of itself is what was wanted."""
    risen = _mean(first("reward/all_episodes")) + 0.5 * _mean(first("reward/std"))
    return _mean(last("reward/all_episodes", 2 * STEPS)) <= risen


CONDITIONS: Final = (
    Condition(
        # A policy that explores more may double its entropy too, but not while its rewards fall.
        lambda first, last: (
            _above(last("train/entropy"), 2 * min(first("train/entropy"), default=math.inf))
            and _below(last("reward/all_episodes"), 0.5 * max(first("reward/all_episodes"), default=0.0))
            and bool(last("train/learning_rate", 1))
        ),
        "the policy has diverged: its entropy has risen to {train_entropy:.2f} nats a token, more than twice what "
        "it was, and its rewards have fallen to less than half: lower train_engine.learning_rate (now "
        "{train_learning_rate:.2g}), and go on from a model or a checkpoint of before",
    ),
    Condition(
        lambda first, last: _above(last("agents/malformed_calls"), max(0.5, _mean(last("agents/calls")))),
        "most calls of tools cannot be read: {agents_malformed_calls:.2g} an episode; look at them in samples.jsonl: "
        "where they are cut, raise sampling.max_new_tokens; where they are another family's, set workflow.tool_form; "
        "where they have become so, lower the learning rate and go on from a checkpoint of before",
    ),
    Condition(
        lambda first, last: _above(last("episodes/failed"), max(0.5, 0.1 * _mean(last("batch/sequences")))),
        "{episodes_failed:.0f} episodes failed in this step, as in those before: nothing is learned from them, and "
        "scores leave them out; the terminal names the first cause and its row, logs/ have the tracebacks",
    ),
    Condition(
        lambda first, last: _above(last("evaluation/failed", 1), 0, 1),
        "{evaluation_failed:.0f} episodes of the evaluation failed and {evaluation_episodes:.0f} finished: its score "
        "is the mean of those that finished; logs/ have the tracebacks",
    ),
    Condition(
        lambda first, last: _above(last("reward/groups_all_equal"), 0.95) and _stands_still(first, last),
        f"in {STEPS} steps all answers to a prompt earned the same in {{reward_groups_all_equal:.0%}} of the groups: "
        "nothing can be learned from that; look at them in samples.jsonl, and take easier or harder prompts",
    ),
    Condition(
        lambda first, last: _below(last("train/gradient_norm", 1), 1e-30, 1),
        "the gradient was exactly 0, so nothing was learned in this step: all answers to each prompt earned the same "
        "(reward/groups_all_equal), all advantages are 0, as with a teacher that is the policy itself, or every token "
        "is out of the loss; check rewards, filters and the models of roles",
    ),
    Condition(
        # Answers of one token are cut wherever one is asked for.
        lambda first, last: _above(last("batch/truncated"), 1 / 3) and not _below(last("batch/response_length"), 1.5),
        "{batch_truncated:.0%} of the answers are cut at their longest length: raise sampling.max_new_tokens, or shape "
        "them (reward_shaping: overlong_penalty; group_filters: mask_truncated)",
    ),
    Condition(
        lambda first, last: (
            _below(last("train/entropy"), 0.05 * _mean(first("train/entropy")))
            and _above(last("reward/groups_all_equal"), 0.5)
            and _stands_still(first, last)
        ),
        "the policy hardly samples any more, and rewards have not risen: its entropy has fallen to {train_entropy:.3f} "
        "nats a token, less than a twentieth of what it was; lower the learning rate, or add "
        "regularizers: [entropy_bonus]",
    ),
    Condition(
        lambda first, last: (
            _above(last("train/behavior_kl"), 0.1)
            or _above(last("train/behavior_kl"), max(0.02, 5 * _mean(first("train/behavior_kl"))))
        ),
        "the policy that samples has left the one that learns: a KL of {train_behavior_kl:.3f} nats a token; lower "
        "rollout.max_staleness or the learning rate, or compare number formats by weight_sync.logprob_check_every=1",
    ),
    Condition(
        lambda first, last: _below(last("train/effective_sample_share"), 0.3),
        "importance weights leave {train_effective_sample_share:.0%} of the samples' worth: lower "
        "rollout.max_staleness, or take a correction that masks",
    ),
    Condition(
        # GSPO clips most tokens, and learns: it is said where it shows for three times as long.
        lambda one, last: _above(last("train/clip_fraction", 3 * STEPS), 0.3, 3 * STEPS) and _stands_still(one, last),
        "clipping takes the gradient from {train_clip_fraction:.0%} of the tokens: lower the learning rate or "
        "training.num_minibatches",
    ),
    Condition(
        lambda first, last: _above(last("train/gradient_norm"), 10_000),
        "the gradient's norm is {train_gradient_norm:,.0f}: look for huge rewards, and for advantages divided by 0",
    ),
    Condition(
        lambda first, last: _above(last("engine/waste"), 0.3),
        "{engine_waste:.0%} of what the trainer's ranks could compute is nothing but waiting for the one with the most "
        "tokens: take larger batches, a larger train_engine.max_tokens_per_microbatch, or fewer ranks",
    ),
    Condition(
        lambda first, last: _above(last("engine/peak_memory_share"), 0.92),
        "the trainer has held {engine_peak_memory_share:.0%} of a GPU's memory: longer sequences may not fit; lower "
        "train_engine.max_tokens_per_microbatch, or set train_engine.activation_checkpointing",
    ),
    Condition(
        # A critic knows nothing at first, so it has twice the time; where rewards hardly differ there is nothing to
        # explain.
        lambda first, last: (
            sum(value < 0 for value in last("train/critic/explained_variance", 2 * STEPS)) >= 8
            and _mean(last("reward/groups_all_equal", 2 * STEPS)) < 0.5
            and _stands_still(first, last)
        ),
        "rewards stand still, and the critic is worse than a mean: raise roles.critic.learning_rate or warmup_steps",
    ),
)


class Diagnostics:
    """Holds each new line of metrics against all conditions.

    Args:
        split: of the run's GPUs, None where it has none for each half.
        rollout: settings of the run; its asynchrony is judged where these are given.
    """

    def __init__(self, split: Split | None = None, rollout: RolloutSection | None = None) -> None:
        self._split = split
        self._rollout = rollout
        self._fresh_worth: float | None = None
        self._open = list(CONDITIONS)
        self._balance_reported = self._overlap_reported = False
        self._first: dict[str, list[float]] = {}
        self.lines: deque[Mapping[str, Any]] = deque(maxlen=KEPT_STEPS)

    def add(self, line: Mapping[str, Any]) -> list[str]:
        """Return what the metrics show now and did not show before.

        Args:
            line: the metrics of the next step.
        """
        self.lines.append(line)
        # Of each metric its own first steps: some come only when a critic has warmed up, and old lines are forgotten.
        for key, value in line.items():
            known = self._first.setdefault(key, [])
            if len(known) < STEPS:
                known.append(value)
        every = list(self.lines)  # a deque has no slices

        def first(key: str) -> list[float]:
            return self._first.get(key, [])

        def last(key: str, steps: int = STEPS) -> list[float]:
            return [line[key] for line in every[-steps:] if key in line]

        holding = [condition for condition in self._open if condition.holds(first, last)]
        self._open = [condition for condition in self._open if condition not in holding]
        numbers = {key.replace("/", "_"): value for key, value in line.items()}
        texts = [condition.words.format(**numbers) for condition in holding]
        if not self._balance_reported and (words := bottleneck(every, self._split)):
            self._balance_reported = True
            texts.append(words)
        if not self._overlap_reported and (words := self._judge_asynchrony(every)):
            self._overlap_reported = True
            texts.append(words)
        return texts

    def _judge_asynchrony(self, lines: Sequence[Mapping[str, Any]]) -> str:
        """Return what `Overlap.describe` says; nothing in a synchronous run, and where no batch has been fresh."""
        if self._rollout is None or not self._rollout.max_staleness:
            return ""
        if lines[-1].get("staleness/max") == 0 and WORTH in lines[-1]:
            self._fresh_worth = lines[-1][WORTH]
        overlap = None
        if self._fresh_worth:
            overlap = Overlap.of(lines, self._rollout.stale == "mask", self._fresh_worth)
        return "" if overlap is None else overlap.describe()
