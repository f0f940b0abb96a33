"""What the episodes of an evaluation say together: means, pass@k, groups of rows, causes of failures."""

from __future__ import annotations

from collections import Counter, defaultdict
from statistics import fmean
from typing import TYPE_CHECKING, Any

from areal_evaluation.pass_at_k import mean_over_prompts, mean_pass_at_k

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Lines = Sequence[Mapping[str, Any]]

MOST_CAUSES = 50
"""Of failures, that are told apart; the rest is counted together."""
LONGEST_CAUSE = 300


def work_out(lines: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Figures of the episodes that ended well.

    Args:
        lines: of all that have ended; at least one has a `reward`.
        ks: of pass@k.
        threshold: an episode passes when its reward reaches it.
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
    """Of each of the named numbers that episodes have under a key; over those that have it."""
    named = defaultdict(list)
    for line in finished:
        for name, value in line.get(key, {}).items():
            named[name].append(value)
    return {name: fmean(values) for name, values in named.items()}


def rewards_of(finished: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Mean reward and pass@k of some episodes that ended well."""
    rewards = defaultdict(list)
    for line in finished:
        rewards[line["row"]].append(line["reward"])
    mean = mean_over_prompts([fmean(own) for own in rewards.values()], trials=len(finished) / len(rewards))
    passes = {str(k): mean_pass_at_k(rewards, k, threshold) for k in ks}
    return {"reward": mean._asdict(), "pass_at_k": {k: found and found._asdict() for k, found in passes.items()}}


def by_category(lines: Lines, ks: Sequence[int], threshold: float) -> dict[str, Any]:
    """Mean reward, pass@k and failures of the rows of each category; nothing where no line has a `category`.

    Args:
        lines: of all episodes that have ended.
        ks: of pass@k.
        threshold: an episode passes when its reward reaches it.
    """
    groups = defaultdict(list)
    for line in lines:
        if "category" in line:
            groups[line["category"]].append(line)
    found = {}
    for name, own in sorted(groups.items()):
        finished = [line for line in own if "reward" in line]
        figures = rewards_of(finished, ks, threshold) if finished else {"reward": None, "pass_at_k": {}}
        found[name] = {"finished": len(finished), "failed": len(own) - len(finished), **figures}
    return found


def causes_of(lines: Lines) -> dict[str, int]:
    """How many episodes failed of what, the most frequent first."""
    counted = Counter(cause_of(line) for line in lines if "error" in line)
    causes = dict(counted.most_common(MOST_CAUSES))
    if rest := counted.total() - sum(causes.values()):
        causes["others"] = rest
    return causes


def cause_of(line: Mapping[str, Any]) -> str:
    """Of an episode that failed, in one line: the last of its traceback, or what was said of it."""
    said = str(line.get("cause") or "")
    if not said:
        *_, said = ["", *(text for text in str(line["error"]).splitlines() if text.strip())]
        if said.startswith("data row ") and ": " in said:
            said = said.split(": ", 1)[1]
    said = said.strip()
    return said if len(said) <= LONGEST_CAUSE else f"{said[:LONGEST_CAUSE]} ..."
