"""The page of a run with the curves of other runs in its charts, and what differs between their configs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import yaml

from areal_core.errors import UsageError
from areal_core.programs import RunFolder
from areal_view.lines import is_metrics, metrics_of, read_lines, thinned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BETWEEN: Final = " · "
"""Separates the name of a metric from the name of the run that it is of."""
IGNORED: Final = frozenset({"run_dir", "base_dir"})
"""Settings that differ between any two runs."""


def compare(data: dict[str, Any], run_dir: Path, others: Sequence[Path]) -> dict[str, Any]:
    """Return the data of a page with the metrics of further runs beside those of its own.

    Args:
        data: data from `run_data`.
        run_dir: folder of the page's run.
        others: folders of the further runs.

    Raises:
        UsageError: one of them has no metrics.
    """
    names = _names([run_dir, *others])
    metrics = data["metrics"]
    columns = {key: dict(zip(metrics["step"], values, strict=True)) for key, values in metrics["columns"].items()}
    for name, folder in zip(names[1:], others, strict=True):
        lines, _ = read_lines(folder / "metrics.jsonl", is_metrics)
        if not lines:
            raise UsageError(f"there is nothing to compare with: {folder} has no metrics")
        found = metrics_of(thinned(lines))
        for key, values in found["columns"].items():
            columns[f"{key}{BETWEEN}{name}"] = dict(zip(found["step"], values, strict=True))
    steps = sorted({step for values in columns.values() for step in values} | {*metrics["step"]})
    times = dict(zip(metrics["step"], metrics["time"], strict=True))
    return {
        **data,
        "name": " and ".join(names),
        "others": names[1:],
        "facts": [*data["facts"], *_differences(names, [run_dir, *others])],
        "metrics": {
            "step": steps,
            "time": [times.get(step) for step in steps],
            "columns": {key: [values.get(step) for step in steps] for key, values in columns.items()},
        },
        "charts": [_with_others(chart, columns, names[1:]) for chart in data["charts"]],
    }


def _with_others(chart: dict[str, Any], columns: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Add the other runs' curves to a chart. Stacked charts stay those of the first run."""
    if chart.get("stacked"):
        return chart
    further = [f"{key}{BETWEEN}{name}" for name in names for key in chart["keys"]]
    return {**chart, "keys": [*chart["keys"], *(key for key in further if key in columns)]}


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its folder, or its path if two folders have one name."""
    names = [folder.absolute().name for folder in folders]
    return [
        name if names.count(name) == 1 else str(folder.absolute()) for name, folder in zip(names, folders, strict=True)
    ]


def _differences(names: Sequence[str], folders: Sequence[Path]) -> list[tuple[str, str]]:
    """Return the settings in which the runs differ, with the value of each run."""
    settings = [dict(_leaves(_config(folder))) for folder in folders]
    keys = sorted({key for values in settings for key in values} - IGNORED)
    return [
        (key, "; ".join(f"{name}: {values.get(key, 'not set')}" for name, values in zip(names, settings, strict=True)))
        for key in keys
        if len({str(values.get(key, "not set")) for values in settings}) > 1
    ]


def _config(folder: Path) -> Any:
    path = RunFolder(folder).config
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, below in value.items():
            yield from _leaves(below, f"{key}.{name}" if key else str(name))
    else:
        yield key, value
