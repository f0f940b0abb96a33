"""The page of a run: what is known of it as JSON, in a template that shows it without a server."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from areal_core.config import load_run
from areal_core.errors import ArealError, UsageError
from areal_core.programs import RunFolder, read_findings
from areal_view.lines import is_group, is_metrics, read_lines
from areal_view.rollouts import COLUMNS, HARDWARE_FILE, INDEXED, read_index, read_step, steps_of, token_count
from areal_view.timeline import in_flight, latest, read_timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import RunConfig

STATIC: Final = Path(__file__).with_name("static")
REPORT_FILE: Final = "report.html"
FILES: Final = ("uPlot.min.css", "view.css", "uPlot.iife.min.js", "view.js")
"""Each stands in the template as a comment of its name."""
POINTS, INDEXED_STEPS, INLINE_STEPS, SAMPLES, SPANS = 2000, 500, 24, 24, 20_000
"""What a page shows at most: points of a curve, steps whose sequences are listed, steps whose tokens it brings along,
samples, spans of all tracks."""
TOKENS: Final = 60_000
"""That a page brings along."""
LOG_BYTES: Final = 2 << 20
"""Of each file of the timeline, its last ones: a page shows the latest hours, the trace shows all."""
CHARTS: Final = (
    (
        "Reward",
        "mean of all finished episodes, before reward shaping and group filters, and the score on held-out data",
        ("reward/all_episodes", "evaluation/reward"),
    ),
    ("Loss", "negative log-likelihood of the completions", ("train/negative_log_likelihood",)),
    (
        "Staleness",
        "batches between a token's weights and the batch that trains on it",
        ("staleness/mean", "staleness/max"),
    ),
    ("Entropy", "of the policy at the tokens it sampled, in nats", ("train/entropy",)),
    (
        "Behavior against trainer",
        "estimated KL(sampling policy ‖ policy at the start of the batch)",
        ("train/behavior_kl",),
    ),
    ("Response length", "sampled tokens in a sequence", ("batch/response_length", "evaluation/response_length")),
    ("Clipping", "share of tokens at which the ratio is clipped", ("train/clip_fraction",)),
    ("Gradient norm", "before clipping", ("train/gradient_norm",)),
)
STACKS: Final = (
    ("Staleness histogram", "share of the trained tokens of each age in batches", "staleness/share_"),
    ("Where the trainer's time goes", "share of all its phases", "time/"),
)
PHASES: Final = tuple(
    f"time/{phase}_s"
    for phase in ("wait", "train", "sleep", "weight_sync", "logprob_check", "evaluate", "checkpoint", "export")
)


def run_data(run_dir: Path, steps: range | None = None, *, is_served: bool = False) -> dict[str, Any] | None:
    """What the page shows of a run; None where it has no metrics yet.

    Args:
        run_dir: of the run.
        steps: whose tokens it brings along; None for those of steps from the whole run, within a bound.
        is_served: whether it can ask for the tokens of a step, and brings none.

    Raises:
        UsageError: it is no run folder.
    """
    lines, odd_lines = read_lines(run_dir / "metrics.jsonl", is_metrics)
    samples, odd_samples = read_lines(run_dir / "samples.jsonl", is_group)
    try:
        resolved = load_run(run_dir)
        name, all_steps, facts, notes = resolved.name, resolved.config.steps, _facts(resolved.config, run_dir), []
    except ArealError as error:  # its plugins may not be installed here
        if not lines:
            raise
        name, all_steps, facts = run_dir.absolute().name, lines[-1]["step"], []
        notes = [f"the config cannot be read here: {error.message}"]
    if not lines:
        return None
    if odd_lines or odd_samples:
        notes.append(f"{odd_lines} lines of metrics.jsonl and {odd_samples} of samples.jsonl cannot be read: left out")
    logged = [step for step in steps_of(run_dir) if steps is None or step in steps]
    if steps is not None and not logged:
        raise UsageError(f"no step of {steps.start}:{steps.stop} was logged")
    read = {step: _sequences(run_dir, step) for step in _spread(logged, INDEXED_STEPS)}
    listed = {step: found for step, found in read.items() if found}
    if odd := read.keys() - listed.keys():
        notes.append(f"the tokens of the steps {sorted(odd)} cannot be read: left out")
    sequences = [one for found in listed.values() for one in found]
    brought = [] if is_served else [*listed] if steps is not None else _brought(run_dir, [*listed])
    tracks, groups = read_timeline(run_dir / "logs", LOG_BYTES)
    return {
        "name": name,
        "made_at": time.time(),
        "steps": all_steps,
        "facts": facts,
        "notes": notes,
        "diagnostics": read_findings(run_dir),
        "config": RunFolder(run_dir).config.read_text(encoding="utf-8"),
        "charts": _charts(lines),
        "metrics": _metrics(_thinned(lines)),
        "sequences": {key: [one[key] for one in sequences] for key in INDEXED},
        "rollouts": {str(step): read_step(run_dir, step) for step in brought},
        "rollout_steps": logged if is_served else brought,
        "missing": f"areal view {run_dir} --steps A:B shows those of A to B, --serve all",
        "columns": COLUMNS,
        "samples": _spread(samples, SAMPLES),
        "in_flight": in_flight(groups),
        "timeline": {"tracks": [track._asdict() for track in latest(tracks, SPANS)]},
    }


def page(data: dict[str, Any]) -> str:
    """The page as one file that opens anywhere.

    Args:
        data: as `run_data` gives it.
    """
    text = (STATIC / "view.html").read_text(encoding="utf-8")
    for file in FILES:
        text = text.replace(f"/*{file}*/", (STATIC / file).read_text(encoding="utf-8"))
    return text.replace("/*run*/", as_json(data))


def script_of(run_dir: Path, step: int) -> str:
    """The tokens of a step as a script beside the page, which a browser loads from a folder as well."""
    return f"arealRollouts({step}, {as_json(read_step(run_dir, step))});"


def write_report(run_dir: Path, steps: range | None = None) -> Path | None:
    """Write `report.html` into a run folder; its path, or None where the run has no metrics yet.

    Args:
        run_dir: of the run.
        steps: whose tokens it brings along; see `run_data`.

    Raises:
        UsageError: it is no run folder.
    """
    if (data := run_data(run_dir, steps)) is None:
        return None
    path = run_dir / REPORT_FILE
    hidden = path.with_name(f".{path.name}")  # what was there stays where the disk is full
    hidden.write_text(page(data), encoding="utf-8")
    return hidden.replace(path)


def as_json(data: Any) -> str:
    """JSON that may stand in a script of a page: numbers that are none are null, and nothing in it ends the script."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """At most so many of them, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def _brought(run_dir: Path, steps: Sequence[int]) -> list[int]:
    """The steps whose tokens a page brings along, spread over all and within its bound."""
    found: list[int] = []
    left = TOKENS
    for step in reversed(_spread(steps, INLINE_STEPS)):  # the newest first
        left -= token_count(run_dir, step)
        if left < 0:
            break
        found.insert(0, step)
    return found


def _sequences(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Of a step; none where its file is damaged, or has been thinned out meanwhile."""
    try:
        return read_index(run_dir, step)
    except (OSError, ValueError, LookupError):
        return []


def _thinned(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lines for curves: some of those that all metrics have, and all with one that few have, such as evaluations."""
    counts = Counter(key for line in lines for key in line)
    rare = {key for key, count in counts.items() if count <= POINTS}
    kept = {id(line) for line in _spread(lines, POINTS)}
    return [line for line in lines if id(line) in kept or rare & line.keys()] if len(lines) > POINTS else list(lines)


def _facts(config: RunConfig, run_dir: Path) -> list[tuple[str, str]]:
    """What the run is, in a few lines."""
    model = config.model.path if config.model.source is None else config.model.source.reference
    facts = [
        ("model", str(model)),
        ("algorithm", config.algorithm.reference),
        ("data", config.dataset.reference),
        ("training", config.train_engine.reference),
    ]
    if config.inference_engine is not None:
        facts.append(("generation", config.inference_engine.reference))
    if (hardware := run_dir / HARDWARE_FILE).is_file():
        facts.append(("trainer", hardware.read_text(encoding="utf-8").strip()))
    return [*facts, ("run folder", str(run_dir.absolute()))]


def _charts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is drawn first, where the run has it."""
    known = {key for line in lines for key in line}
    charts: list[dict[str, Any]] = [
        {"title": title, "text": text, "keys": [key for key in keys if key in known]} for title, text, keys in CHARTS
    ]
    for title, text, begin in STACKS:
        keys = [key for key in PHASES if key in known] if begin == "time/" else _shares(known, begin)
        charts.append({"title": title, "text": text, "keys": keys, "stacked": True})
    return [chart for chart in charts if chart["keys"]]


def _shares(known: set[str], begin: str) -> list[str]:
    return sorted((key for key in known if key.startswith(begin)), key=lambda key: int(key.rsplit("_", 1)[1]))


def _metrics(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A column of each metric, None where a step has none."""
    keys = sorted({key for line in lines for key in line} - {"step", "time"})
    return {
        "step": [line["step"] for line in lines],
        "time": [line.get("time") for line in lines],
        "columns": {key: [line.get(key) for line in lines] for key in keys},
    }
