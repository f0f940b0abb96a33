"""Why a run does not learn, answered from its own records: `areal doctor RUN_FOLDER`.

Each question looks at one cause, at the metrics of the first and the last steps and at the logged answers.
`Diagnostics` watches a run while it lasts, and speaks up once something is wrong; these answers also say what is well,
and the figures that show it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from areal_core.diagnostics.findings import read_findings
from areal_core.disk import read_lines, read_steps

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

ENOUGH: Final = 10
"""Steps that a run needs before it can be said whether it learns."""
MOST: Final = 20
"""Steps that are compared at the beginning and at the end, at most."""
LARGEST: Final = 1e100
"""Largest number that is taken for a metric: sums and squares of larger ones overflow."""
SURE: Final = 2.0
"""Standard errors by which the last rewards must exceed the first."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one question about a run.

    Attributes:
        question: what is asked.
        is_well: False if this keeps the run from learning, True if it does not, None if the records do not say.
        text: the figures, and what to try if they are wrong.
    """

    question: str
    is_well: bool | None
    text: str


@dataclass(frozen=True, slots=True)
class Records:
    """What a run has written.

    Attributes:
        lines: metrics of the steps, in order, without the evaluation before training.
        evaluations: held-out scores by step.
        groups: rewards of the answers of each logged group.
        not_finite: number of steps in which a metric was not finite, by its name.
        unread: lines of the files that could not be read.
    """

    lines: Sequence[Mapping[str, Any]]
    evaluations: Mapping[int, float] = field(default_factory=dict)
    groups: Sequence[Sequence[float]] = ()
    not_finite: Mapping[str, int] = field(default_factory=dict)
    unread: int = 0

    @classmethod
    def read(cls, run_dir: Path) -> Records:
        """Read the records of a run folder. Of a step that occurs twice, the last line counts."""
        by_step = {line["step"]: line for line in read_steps(run_dir / "metrics.jsonl")}
        written = [by_step[step] for step in sorted(by_step) if step >= 0]
        every = [{key: value for key, value in line.items() if _is_finite(value)} for line in written]
        not_finite = Counter(
            key for line in written for key, value in line.items() if isinstance(value, float) and not _is_finite(value)
        )
        scores = {int(line["step"]): line["evaluation/reward"] for line in every if "evaluation/reward" in line}
        samples = read_lines(run_dir / "samples.jsonl")
        groups = [rewards for sample in samples if (rewards := _rewards(sample))]
        unread = _lines(run_dir / "metrics.jsonl") - len(read_steps(run_dir / "metrics.jsonl"))
        unread += _lines(run_dir / "samples.jsonl") - len(groups)
        return cls([line for line in every if line["step"]], scores, groups, not_finite, unread)

    def first(self, name: str) -> list[float]:
        """Return the values of a metric in the first steps."""
        return self._all(name)[: self._compared]

    def last(self, name: str) -> list[float]:
        """Return the values of a metric in the last steps."""
        return self._all(name)[-self._compared :]

    def mean(self, name: str) -> float | None:
        """Return the mean of a metric over the last steps; None if the run does not have it."""
        values = self.last(name)
        return statistics.fmean(values) if values else None

    def count(self, name: str) -> float:
        """Return the mean of a count over the last steps. A step without it has counted nothing."""
        return statistics.fmean(line.get(name, 0.0) for line in self.lines[-self._compared :])

    def has_risen(self) -> bool | None:
        """Return whether rewards have risen by more than chance; None if the run is too short."""
        before, after = self.first("reward/all_episodes"), self.last("reward/all_episodes")
        if len(self._all("reward/all_episodes")) < ENOUGH:
            return None
        noise = math.sqrt(statistics.variance(before) / len(before) + statistics.variance(after) / len(after))
        return statistics.fmean(after) - statistics.fmean(before) > SURE * noise

    @property
    def _compared(self) -> int:
        return min(MOST, max(2, len(self.lines) // 4))

    def _all(self, name: str) -> list[float]:
        return [line[name] for line in self.lines if name in line]


def examine(run_dir: Path) -> list[Answer]:
    """Answer all questions about a run that its records can answer.

    Args:
        run_dir: folder of the run.

    Returns:
        The answers, and behind them what the run has noted itself. Empty if the run has finished no step.
    """
    records = Records.read(run_dir)
    if not records.lines:
        return []
    answers = [Answer(question, *found) for question, ask in QUESTIONS.items() if (found := ask(records)) is not None]
    if records.not_finite:
        named = ", ".join(f"{name} in {count}" for name, count in sorted(records.not_finite.items()))
        text = f"not finite, of {len(records.lines)} steps: {named}; lower the learning rate, and look at the rewards"
        answers.append(Answer("are all metrics finite", False, text))
    if records.unread:
        text = f"{records.unread} lines of metrics.jsonl and samples.jsonl cannot be read and are left out"
        answers.append(Answer("are all records read", None, text))
    noted = [finding for finding in read_findings(run_dir) if finding["step"]]
    return answers + [Answer(f"noted at step {finding['step']}", None, finding["text"]) for finding in noted]


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _lines(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_bytes().splitlines()) if path.is_file() else 0


def _rewards(sample: Mapping[str, Any]) -> list[float]:
    """Return the rewards of a logged group; none if they cannot be read."""
    try:
        rewards = [episode["reward"] for episode in sample["episodes"]]
    except (KeyError, TypeError):
        return []
    return [float(reward) for reward in rewards] if all(map(_is_finite, rewards)) else []


Found = tuple[bool | None, str] | None
"""Whether all is well, and the figures; None if the run has no such metric."""


def _learns(records: Records) -> Found:
    before, after = records.first("reward/all_episodes"), records.last("reward/all_episodes")
    if not before:
        return None
    text = f"the mean reward went from {statistics.fmean(before):.3g} to {statistics.fmean(after):.3g}"
    if len(records.evaluations) > 1:
        scores = [records.evaluations[step] for step in sorted(records.evaluations)]
        text += f", the held-out score from {scores[0]:.3g} to {scores[-1]:.3g} (best {max(scores):.3g})"
    text += f" in {len(records.lines)} steps"
    has_risen = records.has_risen()
    if has_risen is None:
        return None, f"{text}; {ENOUGH} steps are needed to judge"
    if not has_risen and min(after) >= 0.95 * max(*before, *after) and statistics.fmean(after) > 0:
        return True, f"{text}: it began near its best, and stayed there"
    return has_risen, text if has_risen else f"{text}: within the noise"


def _groups_differ(records: Records) -> Found:
    share = records.mean("reward/groups_all_equal")
    if share is None:
        return None
    text = f"all answers to a prompt earned the same in {share:.0%} of the groups"
    if filtered := records.count("groups/filtered"):
        text += f" of the batch, and {filtered:.3g} groups a step were filtered"
    equal = [group[0] for group in records.groups[-200:] if len(group) > 1 and len(set(group)) == 1]
    if share <= 0.75:
        return True, text
    if equal:
        value = statistics.mode(equal)
        least, most = min(map(min, filter(None, records.groups))), max(map(max, filter(None, records.groups)))
        text += f", mostly {value:g}"
        if least == most:
            text += ", as every logged answer: check in samples.jsonl that the reward reads the answers correctly"
        elif value == least:
            text += ": take easier prompts or more samples, and check in samples.jsonl that no right answer fails"
        elif value == most:
            text += ": the task is solved, or take harder prompts"
    return False, text


def _rewards_say_something(records: Records) -> Found:
    names = {name for line in records.lines for name in line if name.startswith("reward/")}
    names -= {"reward/all_episodes", "reward/mean", "reward/std", "reward/groups_all_equal"}
    values = {name.removeprefix("reward/"): [line[name] for line in records.lines if name in line] for name in names}
    constant = {name: found[0] for name, found in values.items() if len(found) >= ENOUGH and len(set(found)) == 1}
    if not values:
        return None
    if not constant:
        return True, f"{', '.join(sorted(values))} {'vary' if len(values) > 1 else 'varies'}"
    named = ", ".join(f"{name} is always {value:g}" for name, value in sorted(constant.items()))
    return False, f"{named}: it teaches nothing; look at samples.jsonl for an answer that it should score otherwise"


def _episodes_are_scored(records: Records) -> Found:
    failed, sequences = records.count("episodes/failed"), records.mean("batch/sequences")
    unscored = records.count("rewards/failed")
    if sequences is None:
        return None
    text = f"{failed:.3g} episodes and {unscored:.3g} rewards failed a step, of {sequences:.3g} sequences in a batch"
    is_well = failed + unscored <= 0.1 * sequences
    return is_well, text if is_well else f"{text}: the tracebacks are in logs/"


def _answers_end(records: Records) -> Found:
    cut, length = records.mean("batch/truncated"), records.mean("batch/response_length") or 0.0
    if cut is None:
        return None
    text = f"{cut:.0%} of the answers were cut off, at a mean length of {length:.3g} tokens"
    is_well = cut <= 1 / 3 or length < 1.5
    return is_well, text if is_well else f"{text}: raise sampling.max_new_tokens, or penalize long answers"


def _engines_agree(records: Records) -> Found:
    kl, difference = records.mean("train/behavior_kl"), records.mean("train/behavior_difference")
    if kl is None or difference is None:
        return None
    stale = records.mean("staleness/mean") or 0.0
    text = f"sampler and trainer differ by {difference:.2g} nats a token (KL {kl:.2g}) at a staleness of {stale:.2g}"
    if kl <= 0.02:
        return True, text
    if stale:
        return False, f"{text}: lower rollout.max_staleness or the learning rate, or add a correction"
    return (
        False,
        f"{text}: they compute differently; set weight_sync.logprob_check_every: 1, and compare number formats",
    )


def _is_not_clipped_away(records: Records) -> Found:
    clipped = records.mean("train/clip_fraction")
    if clipped is None:
        return None
    text = f"clipping takes the gradient from {clipped:.0%} of the tokens"
    is_well = clipped <= 0.3 or bool(records.has_risen())
    return is_well, text if is_well else f"{text}: lower the learning rate or training.num_minibatches"


def _has_a_gradient(records: Records) -> Found:
    norms = records.last("train/gradient_norm")
    skipped = sum(line.get("train/skipped", 0.0) for line in records.lines)
    if not norms:
        return (False, f"{skipped:g} updates were skipped: their gradients were not finite") if skipped else None
    zero = sum(norm < 1e-12 for norm in norms) / len(norms)
    text = f"the gradient's norm is {statistics.median(norms):.2g}"
    if skipped > 0.1 * len(records.lines):
        return False, f"{text}, and {skipped:g} updates were skipped, because it was not finite: look for huge rewards"
    if zero > 0.5:
        return False, f"{text}, and exactly 0 in {zero:.0%} of the steps: no advantage, or no token in the loss"
    if statistics.median(norms) > 10_000:
        return False, f"{text}: look for huge rewards, and for advantages divided by 0"
    return True, text


def _moves(records: Records) -> Found:
    rates = [line["train/learning_rate"] for line in records.lines if "train/learning_rate" in line]
    if not rates:
        return None
    text = f"the learning rate was at most {max(rates):.2g}, and {rates[-1]:.2g} at last"
    if max(rates) < 1e-9:
        return False, f"{text}: nothing moves; set train_engine.learning_rate, and look at its schedule"
    rises = len(rates) >= ENOUGH and rates[-1] == max(rates) and rates[-1] > 1.1 * rates[-ENOUGH]
    if rises:
        text += ", and still rises: train_engine.warmup_steps is not over"
    first, last = records.first("train/entropy"), records.last("train/entropy")
    if records.has_risen() is False and first and last and len(records.lines) >= ENOUGH:
        change = abs(statistics.fmean(last) / max(statistics.fmean(first), 1e-9) - 1)
        clipped, kl = records.mean("train/clip_fraction") or 0.0, records.mean("train/behavior_kl") or 0.0
        if change < 0.02 and clipped < 1e-3 and kl < 1e-5 and max(records.last("train/gradient_norm"), default=1.0) > 0:
            return False, f"{text}: the policy hardly moves, its entropy changed by {change:.1%}; raise the rate"
    return None if rises else True, text


SEEN: Final = 0.05
"""Mean reward of the first steps above which rewards of 0 at the end are a collapse, not a task that is too hard."""


def _explores(records: Records) -> Found:
    first, last = records.first("train/entropy"), records.last("train/entropy")
    if not first or not last:
        return None
    before, after = statistics.fmean(first), statistics.fmean(last)
    text = f"the entropy went from {before:.2g} to {after:.2g} nats a token"
    had, has = records.first("reward/all_episodes"), records.last("reward/all_episodes")
    has_fallen = bool(had and has) and 0 <= max(has) < 0.5 * max(had) and statistics.fmean(has) < statistics.fmean(had)
    if after > 2 * min(first) and has_fallen:
        return False, f"{text}, and rewards have halved: the policy has diverged; lower the learning rate, start again"
    if had and has and max(has) == 0 and min(has) == 0 and statistics.fmean(had) > SEEN:
        earned = f"rewards were {statistics.fmean(had):.2g} at first, and are all 0 now"
        return False, f"{text}, and {earned}: the policy has collapsed; lower the learning rate, start again"
    if after < 0.05 * before and records.has_risen() is False:
        return False, f"{text}: the policy hardly samples any more; lower the learning rate, or add an entropy bonus"
    return True, text


def _data_is_fresh(records: Records) -> Found:
    stale = records.mean("staleness/mean")
    if stale is None:
        return None
    over, sampled = records.count("staleness/tokens_over_bound"), records.mean("batch/sampled_tokens") or 0.0
    share = over / (over + sampled) if over + sampled else 0.0
    dropped = records.count("groups/stale")
    text = (
        f"tokens are {stale:.2g} batches old, {share:.0%} of them over the bound; {dropped:.2g} groups a step dropped"
    )
    worth = records.mean("train/effective_sample_share")
    if share > 0.3 or (worth is not None and worth < 0.3):
        kept = "" if worth is None else f", and the samples are worth {worth:.0%} of fresh ones"
        return (
            False,
            f"{text}{kept}: lower rollout.max_pending_batches or raise rollout.max_staleness with a correction",
        )
    return True, text


QUESTIONS: Final[Mapping[str, Callable[[Records], Found]]] = {
    "does it learn": _learns,
    "do the answers of a group differ in reward": _groups_differ,
    "does each reward vary": _rewards_say_something,
    "are episodes scored": _episodes_are_scored,
    "do answers end by themselves": _answers_end,
    "do sampler and trainer agree": _engines_agree,
    "is there a gradient": _has_a_gradient,
    "does clipping leave a gradient": _is_not_clipped_away,
    "does the policy move": _moves,
    "does the policy explore": _explores,
    "is the data fresh": _data_is_fresh,
}
