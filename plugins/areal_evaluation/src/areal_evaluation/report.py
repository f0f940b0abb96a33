"""The figures of an evaluation for people: as a text for the terminal, and as an HTML page with every episode."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_evaluation.pass_at_k import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN_CAUSES = 5
MOST_EPISODES = 2000
"""On the page; a browser opens no more at once. The others stand in `samples.jsonl`."""


def report(figures: dict[str, Any]) -> str:
    """A line for each figure; below them a table of categories and the causes of failures, where there are such."""
    rows = _rows(figures)
    width = max(len(label) for label in rows)
    lines = [figures["name"], *(f"  {label:<{width}}  {text}" for label, text in rows.items())]
    return "\n".join([*lines, *_categories(figures), *_failures(figures)])


def write_page(path: Path, figures: dict[str, Any], samples: Path) -> None:
    """Write the page: figures, and what was said in every episode, folded.

    Args:
        path: of the file.
        figures: as they stand in `evaluation.json`.
        samples: file of JSON lines, one for each episode that has ended.

    Raises:
        OSError: the disk refuses.
    """
    from jinja2 import Environment

    with samples.open(encoding="utf-8") as lines:
        episodes = sorted(islice(map(json.loads, lines), MOST_EPISODES), key=lambda e: (e["row"], e["sample"]))
    environment = Environment(autoescape=True)
    environment.globals |= {
        "interval": interval,
        "has_passed": lambda e: e["reward"] >= figures["threshold"] - TOLERANCE,
    }
    page = environment.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    written = page.stream(figures=figures, rows=_rows(figures), episodes=episodes)
    written.dump(str(path), encoding="utf-8", errors="backslashreplace")


def _rows(figures: dict[str, Any]) -> dict[str, str]:
    evaluation, sampling = figures["config"]["evaluation"], figures["config"]["sampling"]
    asked, length = evaluation["temperature"], figures["response_length"]
    temperature = f"temperature {sampling['temperature'] if asked is None else asked:g}"
    if figures["endpoint"] and asked is None:
        temperature = "the agent's temperature"
    samples = f"{evaluation['samples_per_prompt']} answers to each at {temperature}"
    lengths = "tokens are not counted by the endpoint" if length is None else f"{length:.1f} tokens"
    return {
        "model": figures["model"],
        **({"endpoint": figures["endpoint"]} if figures["endpoint"] else {}),
        "data": f"{evaluation['dataset']['type']}: {figures['reward']['prompts']} prompts, {samples}",
        "mean reward": interval(figures["reward"]),
        **{f"pass@{k}": interval(estimate) for k, estimate in figures["pass_at_k"].items()},
        **{f"reward {name}": f"{value:.3f}" for name, value in figures["rewards"].items()},
        **{name: f"{value:,.4g}" for name, value in figures["metrics"].items() if value},
        "response length": f"{lengths}; {figures['truncated']:.1%} truncated",
        "episodes": f"{figures['finished']} of {figures['episodes']}, {figures['failed']} failed",
        "speed": f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['episodes_per_s']:,.1f} episodes/s",
        "time": f"{figures['seconds']:,.2f} s",
    }


def interval(estimate: dict[str, float] | None) -> str:
    """A figure with its confidence interval and its standard error."""
    if estimate is None:
        return "no prompt has so many answers"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}  (one prompt: no interval)"
    error = "" if estimate["standard_error"] is None else f"; standard error {estimate['standard_error']:.3f}"
    return f"{estimate['value']:.3f}  (95%: {estimate['low']:.3f} to {estimate['high']:.3f}{error})"


def _categories(figures: dict[str, Any]) -> Iterator[str]:
    if not figures["categories"]:
        return
    ks = figures["pass_at_k"]
    table: list[tuple[Any, ...]] = [(figures["category"], "prompts", "reward", *(f"pass@{k}" for k in ks), "failed")]
    for name, own in figures["categories"].items():
        prompts = own["reward"]["prompts"] if own["reward"] else 0
        values = [own["reward"], *(own["pass_at_k"].get(k) for k in ks)]
        cells = ("-" if value is None else f"{value['value']:.3f}" for value in values)
        table.append((name, prompts, *cells, own["failed"]))
    width = max(len(name) for name, *_ in table)
    yield ""
    yield from (f"  {name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}" for name, *cells in table)


def _failures(figures: dict[str, Any]) -> Iterator[str]:
    causes = list(figures["failures"].items())
    if causes:
        yield "\n  failed of"
    yield from (f"  {count:>6}  {cause}" for cause, count in causes[:SHOWN_CAUSES])
    if more := sum(count for _, count in causes[SHOWN_CAUSES:]):
        yield f"  {more:>6}  other causes (evaluation.json)"
