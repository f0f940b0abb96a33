"""Reports of an evaluation: text for the terminal, and an HTML page with every episode."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_evaluation.pass_at_k import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Iterator

SHOWN_CAUSES = 5
"""Causes of failures in the text report."""
MAX_EPISODES = 2000
"""Episodes on the page, because browsers are slow with more. `samples.jsonl` has all of them."""


def report(figures: dict[str, Any]) -> str:
    """Return the text report: a line for each figure, then a table of categories and the causes of failures."""
    rows = _rows(figures)
    width = max(len(label) for label in rows)
    lines = [figures["name"], *(f"  {label:<{width}}  {text}" for label, text in rows.items())]
    return "\n".join([*lines, *_categories(figures), *_failures(figures)])


def write_page(path: Path, figures: dict[str, Any], samples: Path) -> None:
    """Write the HTML page with the figures and the transcripts of all episodes.

    Args:
        path: path of the page.
        figures: contents of `evaluation.json`.
        samples: file of JSON lines, one for each episode that has ended.

    Raises:
        OSError: the page cannot be written.
    """
    from jinja2 import Environment

    with samples.open(encoding="utf-8") as lines:
        episodes = sorted(islice(map(json.loads, lines), MAX_EPISODES), key=lambda e: (e["row"], e["sample"]))
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
    eval_temperature, length = evaluation["temperature"], figures["response_length"]
    temperature = f"temperature {sampling['temperature'] if eval_temperature is None else eval_temperature:g}"
    if figures["endpoint"] and eval_temperature is None:
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
    """Return a figure as text with its confidence interval and its standard error."""
    if estimate is None:
        return "no prompt has enough answers"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}  (one prompt: no interval)"
    error = "" if estimate["standard_error"] is None else f"; standard error {estimate['standard_error']:.3f}"
    return f"{estimate['value']:.3f}  (95%: {estimate['low']:.3f} to {estimate['high']:.3f}{error})"


def _categories(figures: dict[str, Any]) -> Iterator[str]:
    if not figures["categories"]:
        return
    ks = figures["pass_at_k"]
    table: list[tuple[Any, ...]] = [(figures["category"], "prompts", "reward", *(f"pass@{k}" for k in ks), "failed")]
    for name, category in figures["categories"].items():
        prompts = category["reward"]["prompts"] if category["reward"] else 0
        values = [category["reward"], *(category["pass_at_k"].get(k) for k in ks)]
        cells = ("-" if value is None else f"{value['value']:.3f}" for value in values)
        table.append((name, prompts, *cells, category["failed"]))
    width = max(len(name) for name, *_ in table)
    yield ""
    yield from (f"  {name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}" for name, *cells in table)


def _failures(figures: dict[str, Any]) -> Iterator[str]:
    causes = list(figures["failures"].items())
    if causes:
        yield "\n  causes of failures"
    yield from (f"  {count:>6}  {cause}" for cause, count in causes[:SHOWN_CAUSES])
    if others := sum(count for _, count in causes[SHOWN_CAUSES:]):
        yield f"  {others:>6}  other causes (evaluation.json)"
