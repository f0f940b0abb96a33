"""From the metrics of runs to the table of `asynchronous.py`, whose text explains the bounds."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

APART, TURNS = "sync", "turns-sync"
"""The two synchronous rows that all others are compared with."""
PARTS = ("wait", "sleep", "train", "weight_sync")
LOADS = ("weight_sync/pause_s", "weight_sync/transfer_s", "weight_sync/resume_s", "servers/continued")
"""Of an update: its parts, and the requests that went on over it."""
WAITED = 0.05
"""Share of a step; a batch that is stored is there in a hundredth."""
HEAD = (
    "| | samples/s | tokens/s | s/step, median | mean | wait_s | sleep_s | train_s | sync_s | staleness |"
    " over the bound | x (a) | bound | x (b) | bound | share of the bound |"
)


def end_of_warm_up(lines: Sequence[Mapping[str, float]], least: int, most: int) -> int | None:
    """The number of steps before the first one that counts; None where that has not come yet.

    Args:
        lines: of `metrics.jsonl`, one a step.
        least: steps that do not count in any case.
        most: steps after which the others count although the trainer has not waited for a batch since the `least`.
    """
    waited = (step for step in range(max(1, least), len(lines) + 1) if has_waited(lines[step - 1]))
    return next(waited, most if len(lines) >= most else None)


def has_waited(line: Mapping[str, float]) -> bool:
    """Whether the trainer waited for the batch of a step, so that no batch was stored when it came."""
    return line["time/wait_s"] > WAITED * line["time/step_s"]


def summarize(lines: Sequence[Mapping[str, float]], warm_up: int, prompt: int) -> dict[str, float]:
    """One row from the journal of its run.

    Args:
        lines: of `metrics.jsonl`, one a step.
        warm_up: steps that do not count.
        prompt: tokens of each prompt, which are none of the generated ones.
    """
    window = lines[warm_up:]
    seconds = lines[-1]["time"] - lines[warm_up - 1]["time"]

    def total(key: str) -> float:
        return sum(line.get(key, 0.0) for line in window)

    samples = total("batch/sequences")
    # A token over the bound on staleness is masked and so not among the journal's sampled ones; it cost as much.
    tokens = total("batch/tokens") - prompt * samples
    row = {
        "steps": float(len(window)),
        "samples": samples,
        "tokens": tokens,
        "seconds": seconds,
        "step_s": seconds / len(window),
        "step_median_s": statistics.median(line["time/step_s"] for line in window),
        "staleness": total("staleness/mean") / len(window),
        "over_bound": total("staleness/tokens_over_bound") / tokens,
        "groups_dropped": total("groups/stale"),
        "began_empty": float(has_waited(lines[warm_up - 1])),
        "longest_train_s": max(line["time/train_s"] for line in window),
        "longest_sync_s": max(line["time/weight_sync_s"] for line in window),
    }
    row |= {key: total(key) / len(window) for key in LOADS}
    return row | {f"{part}_s": total(f"time/{part}_s") / len(window) for part in PARTS}


def bounds(results: Mapping[str, Any]) -> dict[str, float]:
    """The shortest steps that asynchronous training could have, in seconds, by where it trains.

    A bound is left out while the peak rate or the synchronous row that it comes from is missing.
    """
    rows, setting, found = results["rows"], results.get("setting", {}), {}
    servers, trainers = (int(setting.get(key, 1)) for key in ("servers", "trainers"))
    peak = results.get("peak", {}).get("tokens_per_s")
    if peak and APART in rows:
        some = rows[APART]
        found["apart"] = max(some["tokens"] / some["steps"] / (servers * peak), some["train_s"])
    if peak and TURNS in rows:
        every = rows[TURNS]
        found["turns"] = every["tokens"] / every["steps"] / ((servers + trainers) * peak) + every["train_s"]
    return found


def compare(name: str, results: Mapping[str, Any]) -> dict[str, float]:
    """What a row gained over the synchronous ones, what it could have gained, and the share of the latter."""
    rows, shortest = results["rows"], bounds(results)
    row = rows[name]
    found: dict[str, float] = {}
    for letter, base in (("a", TURNS), ("b", APART)):
        if base in rows:
            found[f"over_{letter}"] = _rate(row) / _rate(rows[base])
    if name in (APART, TURNS):
        return found
    if name.startswith("turns"):
        if "turns" in shortest:
            found["bound_a"] = (rows[TURNS]["wait_s"] + rows[TURNS]["train_s"]) / shortest["turns"]
            found["share"] = found["over_a"] / found["bound_a"]
        return found
    if "apart" in shortest:
        for letter, base in (("a", TURNS), ("b", APART)):
            if base in rows:
                found[f"bound_{letter}"] = rows[base]["step_s"] / shortest["apart"]
        found["share"] = found["over_b"] / found["bound_b"]
    return found


def _rate(row: Mapping[str, float]) -> float:
    return row["samples"] / row["seconds"]


def table(results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """The rows that are there, in the order of `titles`, as Markdown."""
    rows, peak = results["rows"], results.get("peak", {}).get("tokens_per_s")
    lines = [HEAD, "|---" * (HEAD.count("|") - 1) + "|"]
    for name in (name for name in titles if name in rows):
        row, gained = rows[name], compare(name, results)
        cells = [titles[name], f"{_rate(row):,.0f}", f"{row['tokens'] / row['seconds']:,.0f}"]
        cells += [f"{row[key]:.2f}" for key in ("step_median_s", "step_s", *(f"{part}_s" for part in PARTS))]
        cells += [f"{row['staleness']:.2f}", f"{row['over_bound']:.1%}"]
        keys = ("over_a", "bound_a", "over_b", "bound_b")
        cells += [f"{gained[key]:.2f}" if key in gained else "" for key in keys]
        cells.append(f"{gained['share']:.2f}" if "share" in gained else "")
        lines.append(f"| {' | '.join(cells)} |")
    told = [f"peak generation rate of one GPU {peak:,.0f} tokens/s" if peak else "no peak rate was measured"]
    told += [f"shortest step {where} {seconds:.2f} s" for where, seconds in bounds(results).items()]
    return "\n".join([*lines, "", "; ".join(told)])


def table_of_load(results: Mapping[str, Any], titles: Mapping[str, str]) -> str:
    """What updates and processes of the same rows cost."""
    rows = {name: results["rows"][name] for name in titles if name in results["rows"]}
    roles = sorted({role for row in rows.values() for role in row.get("cores", {})})
    head = [
        "",
        "pause_ms",
        "transfer_ms",
        "resume_ms",
        "longest sync_s",
        "longest train_s",
        "continued an update",
        "began with nothing stored",
        *(f"cores: {r}" for r in roles),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        cells = [titles[name], *(f"{1000 * row.get(key, 0.0):.0f}" for key in LOADS[:3])]
        cells += [f"{row['longest_sync_s']:.2f}", f"{row['longest_train_s']:.2f}", f"{row.get(LOADS[3], 0.0):.0f}"]
        cells.append("yes" if row["began_empty"] else "no")
        cells += [f"{row.get('cores', {}).get(role, 0.0):.2f}" for role in roles]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
