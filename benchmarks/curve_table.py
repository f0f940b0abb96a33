"""From the points of `curve.py` to its table."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    Point = Mapping[str, float]

HELD_OUT, REWARD = "evaluation/reward", "reward/mean"
SMOOTHED = 5
"""Steps that a reward against time is the mean of; single batches swing too much to be told apart."""
LAST = 10
"""Steps whose reward is averaged at either end of a row."""


def title(row: str) -> str:
    """Of a row, for readers."""
    way, _, seed = row.partition("/")
    side, way = ("TRL", way[3:].lstrip("-")) if way.startswith("trl") else ("areal", way)
    how = {"sync": "synchronous", "": "server"}.get(way, way.replace("async-", "at most "))
    words = f"{side}, {how}"
    return f"{words}, seed {seed}" if seed else words


def scores(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Held-out scores and their seconds."""
    return [(point["seconds"], point[HELD_OUT]) for point in points if HELD_OUT in point]


def rewards(points: Sequence[Point], over: int = 1) -> list[tuple[float, float]]:
    """Rewards of the training batches and their seconds, each the mean of so many steps up to its own."""
    trained = [point for point in points if REWARD in point]
    return [
        (point["seconds"], mean([each[REWARD] for each in trained[max(0, number + 1 - over) : number + 1]]))
        for number, point in enumerate(trained)
    ]


def mean(values: Sequence[float]) -> float:
    """0 where there are none."""
    return sum(values) / len(values) if values else 0.0


def goal(rows: Mapping[str, Sequence[Point]]) -> float:
    """The reward whose time is told for all rows: the median end of TRL's server mode, or else the lowest end."""
    trained = {row: [value for _, value in rewards(points)[-LAST:]] for row, points in rows.items()}
    ends = {row: mean(values) for row, values in trained.items() if values}
    theirs = [value for row, value in ends.items() if row.partition("/")[0] == "trl"]
    return median(theirs) if theirs else min(ends.values(), default=0.0)


def table(rows: Mapping[str, Sequence[Point]], gpus: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    """All rows, in Markdown; `gpus` has for a row and a GPU how `busy` it was and its memory in `gib`."""
    mark = goal(rows)
    heads = ["", "steps", "seconds", "evaluating", "samples/s", "tokens/s", "s/step", "wait", "train", "sync"]
    heads += ["staleness", "answer tokens", "reward", "held-out", f"s to {mark:.3f}", "GPUs busy", "GiB"]
    lines = [heads, ["---"] * len(heads)]
    lines += [[*_cells(row, points, mark), *_gpus(gpus.get(row, {}))] for row, points in rows.items() if points]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def by_time(rows: Mapping[str, Sequence[Point]], every_s: float) -> str:
    """How far each row was at the same seconds, in Markdown: its steps, and the reward of the last few."""
    longest = max((points[-1]["seconds"] for points in rows.values() if points), default=0.0)
    moments = [every_s * number for number in range(1, int(longest / every_s) + 1)]
    lines = [["seconds", *(f"{moment:.0f}" for moment in moments)], ["---"] * (1 + len(moments))]
    for row, points in rows.items():
        gained = rewards(points, SMOOTHED)
        steps = [sum(second <= moment for second, _ in gained) for moment in moments]
        lines.append([f"{title(row)}: steps", *(str(step) for step in steps)])
        lines.append(["reward", *(f"{gained[step - 1][1]:.3f}" if step else "" for step in steps)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _gpus(found: Mapping[str, Mapping[str, float]]) -> list[str]:
    used = [found[gpu] for gpu in sorted(found)]
    return [" ".join(f"{gpu['busy']:.2f}" for gpu in used), " ".join(f"{gpu['gib']:.0f}" for gpu in used)]


def _cells(row: str, points: Sequence[Point], mark: float) -> list[str]:
    trained = [point for point in points if REWARD in point]
    seconds = points[-1]["seconds"]
    evaluating = sum(point.get("time/evaluate_s", 0.0) for point in points)
    samples = sum(point.get("batch/sequences", 0.0) for point in trained)
    tokens = sum(point.get("batch/sequences", 0.0) * point.get("batch/response_length", 0.0) for point in trained)
    found, gained = scores(points), rewards(points)

    def each(key: str, digits: int = 2) -> str:
        return f"{mean([point[key] for point in trained if key in point]):.{digits}f}"

    def ends(values: Sequence[float], over: int) -> str:
        return f"{mean(values[:over]):.3f} → {mean(values[-over:]):.3f}" if values else ""

    return [
        title(row),
        f"{points[-1]['step']:.0f}",
        f"{seconds:.0f}",
        f"{evaluating:.0f}",
        f"{samples / seconds if seconds else 0.0:,.0f}",
        f"{tokens / seconds if seconds else 0.0:,.0f}",
        each("time/step_s"),
        each("time/wait_s"),
        each("time/train_s"),
        each("time/weight_sync_s", 3),
        each("staleness/mean"),
        each("batch/response_length", 0),
        ends([value for _, value in gained], LAST),
        ends([score for _, score in found], 1),
        next((f"{second:.0f}" for second, value in rewards(points, LAST) if value >= mark), "never"),
    ]
