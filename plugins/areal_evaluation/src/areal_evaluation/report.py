"""The figures of an evaluation as a text for the terminal."""

from __future__ import annotations

from typing import Any

SHOWN_CAUSES = 5


def report(figures: dict[str, Any]) -> str:
    """A line for each figure; below them a table of categories and the causes of failures, where there are such."""
    evaluation = figures["config"]["evaluation"]
    samples = f"{evaluation['samples_per_prompt']} answers to each at {temperature_of(figures)}"
    rows = {"model": figures["model"]}
    if figures["endpoint"]:
        rows["endpoint"] = figures["endpoint"]
    rows |= {
        "data": f"{evaluation['dataset']['type']}: {figures['reward']['prompts']} prompts, {samples}",
        "mean reward": interval(figures["reward"]),
        **{f"pass@{k}": interval(estimate) for k, estimate in figures["pass_at_k"].items()},
        **{f"reward {name}": f"{value:.3f}" for name, value in figures["rewards"].items()},
        **{name: f"{value:,.4g}" for name, value in figures["metrics"].items() if value},
        "response length": length_of(figures),
        "episodes": f"{figures['finished']} of {figures['episodes']}, {figures['failed']} failed",
        "speed": f"{figures['tokens_per_s']:,.0f} tokens/s, {figures['episodes_per_s']:,.1f} episodes/s",
        "time": f"{figures['seconds']:,.2f} s",
    }
    width = max(len(label) for label in rows)
    lines = [figures["name"], *(f"  {label:<{width}}  {text}" for label, text in rows.items())]
    return "\n".join([*lines, *_categories(figures), *_failures(figures)])


def temperature_of(figures: dict[str, Any]) -> str:
    """The temperature in words; an agent chooses its own where a model of others is asked and nothing is said."""
    asked, sampling = figures["config"]["evaluation"]["temperature"], figures["config"]["sampling"]
    if figures["endpoint"] and asked is None:
        return "the agent's temperature"
    return f"temperature {sampling['temperature'] if asked is None else asked:g}"


def length_of(figures: dict[str, Any]) -> str:
    """How long answers are, where that is known."""
    length = figures["response_length"]
    message = "tokens are not counted by the endpoint" if length is None else f"{length:.1f} tokens"
    return f"{message}; {figures['truncated']:.1%} truncated"


def interval(estimate: dict[str, float] | None) -> str:
    """A figure with its confidence interval and its standard error."""
    if estimate is None:
        return "no prompt has so many answers"
    if estimate["low"] is None:
        return f"{estimate['value']:.3f}  (one prompt: no interval)"
    error = "" if estimate["standard_error"] is None else f"; standard error {estimate['standard_error']:.3f}"
    return f"{estimate['value']:.3f}  (95%: {estimate['low']:.3f} to {estimate['high']:.3f}{error})"


def _categories(figures: dict[str, Any]) -> list[str]:
    if not figures["categories"]:
        return []
    width = max(len(name) for name in (figures["category"], *figures["categories"]))
    passes = [f"pass@{k}" for k in figures["pass_at_k"]]
    head = "".join(f"{name:>12}" for name in ("prompts", "reward", *passes, "failed"))
    lines = ["", f"  {figures['category']:<{width}}{head}"]
    for name, own in figures["categories"].items():
        prompts = own["reward"]["prompts"] if own["reward"] else 0
        values = [own["reward"], *(own["pass_at_k"].get(k) for k in figures["pass_at_k"])]
        cells = [f"{prompts}", *("-" if v is None else f"{v['value']:.3f}" for v in values), f"{own['failed']}"]
        lines.append(f"  {name:<{width}}{''.join(f'{cell:>12}' for cell in cells)}")
    return lines


def _failures(figures: dict[str, Any]) -> list[str]:
    causes = list(figures["failures"].items())
    if not causes:
        return []
    more = sum(count for _, count in causes[SHOWN_CAUSES:])
    shown = [f"  {count:>6}  {cause}" for cause, count in causes[:SHOWN_CAUSES]]
    return ["", "  failed of", *shown, *([f"  {more:>6}  other causes (evaluation.json)"] if more else [])]
