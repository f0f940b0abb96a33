"""Compute the figures of an evaluation from its episodes: means, pass@k, categories, causes of failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from areal_evaluation.pass_at_k import mean_over_prompts, mean_pass_at_k

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Lines = Sequence[Mapping[str, Any]]

MAX_CAUSES = 50
"""Number of causes of failures that are counted separately; the rest is counted as "others"."""
MAX_CAUSE_LENGTH = 300
"""Characters of a cause."""


def compute(lines: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Return the figures of the episodes that finished.

    Args:
        lines: all episodes that have ended. At least one has a `reward`.
        ks: values of k for pass@k.
        threshold: minimum reward of an episode that passes.
    """
    finished = [line for line in lines if "reward" in line]
    seconds = max(line["seconds"] for line in lines)
    tokens = [line["tokens"] for line in finished if line["tokens"] is not None]
    return {
        "finished": len(finished),
        "failed": len(lines) - len(finished),
        **rewards_of(finished, ks, threshold),
        "threshold": threshold,
        "rewards": _means(finished, "rewards"),
        "metrics": dict(sorted(_means(finished, "metrics").items())),
        "response_length": fmean(tokens) if tokens else None,
        "truncated": fmean(line["truncated"] for line in finished),
        "seconds": seconds,
        "tokens_per_s": sum(tokens) / seconds,
        "episodes_per_s": len(lines) / seconds,
        "failures": causes_of(lines),
        "categories": by_category(lines, ks, threshold),
    }


def _means(finished: Lines, key: str) -> dict[str, float]:
    """Return the mean of each named number under a key, over the episodes that have it."""
    named = defaultdict(list)
    for line in finished:
        for name, value in line.get(key, {}).items():
            named[name].append(value)
    return {name: fmean(values) for name, values in named.items()}


def rewards_of(finished: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Return the mean reward and pass@k of episodes that finished."""
    rewards = defaultdict(list)
    for line in finished:
        rewards[line["row"]].append(line["reward"])
    mean = mean_over_prompts([fmean(values) for values in rewards.values()], trials=len(finished) / len(rewards))
    passes = {str(k): mean_pass_at_k(rewards, k, threshold) for k in ks}
    return {
        "reward": mean._asdict(),
        "pass_at_k": {k: estimate and estimate._asdict() for k, estimate in passes.items()},
    }


def by_category(lines: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Return mean reward, pass@k and failures by category; empty if no line has a `category`.

    Args:
        lines: all episodes that have ended.
        ks: values of k for pass@k.
        threshold: minimum reward of an episode that passes.
    """
    groups = defaultdict(list)
    for line in lines:
        if "category" in line:
            groups[line["category"]].append(line)
    categories = {}
    for name, members in sorted(groups.items()):
        finished = [line for line in members if "reward" in line]
        figures = rewards_of(finished, ks, threshold) if finished else {"reward": None, "pass_at_k": {}}
        categories[name] = {"finished": len(finished), "failed": len(members) - len(finished), **figures}
    return categories


def causes_of(lines: Lines) -> dict[str, int]:
    """Return the number of failed episodes by cause, most frequent first."""
    counted = Counter(cause_of(line) for line in lines if "error" in line)
    causes = dict(counted.most_common(MAX_CAUSES))
    if rest := counted.total() - sum(causes.values()):
        causes["others"] = rest
    return causes


def cause_of(line: Mapping[str, Any]) -> str:
    """Return the cause of a failed episode in one line: its recorded cause, or the last line of its traceback."""
    cause = str(line.get("cause") or "")
    if not cause:
        *_, cause = ["", *(text for text in str(line["error"]).splitlines() if text.strip())]
        if cause.startswith("data row ") and ": " in cause:
            cause = cause.split(": ", 1)[1]
    cause = cause.strip()
    return cause if len(cause) <= MAX_CAUSE_LENGTH else f"{cause[:MAX_CAUSE_LENGTH]} ..."
