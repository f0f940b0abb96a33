"""Build the page of a run: the run's data as JSON, in an HTML template that needs no server."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from areal_core.config import load_run
from areal_core.errors import ArealError, UsageError
from areal_core.programs import RunFolder, read_findings
from areal_view.comparison import compare
from areal_view.lines import is_group, is_metrics, metrics_of, read_lines, spread, thinned
from areal_view.rollouts import COLUMNS, HARDWARE_FILE, INDEXED, read_index, read_step, steps_of, token_count
from areal_view.timeline import in_flight, latest, read_timeline

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.config import RunConfig

STATIC: Final = Path(__file__).with_name("static")
REPORT_FILE: Final = "report.html"
COMPARISON_FILE: Final = "comparison.html"
FILES: Final = ("uPlot.min.css", "view.css", "uPlot.iife.min.js", "view.js")
"""Files that replace the comments with their names in the template."""
INDEXED_STEPS: Final = 500
"""Maximum number of steps whose sequences are listed."""
INLINE_STEPS: Final = 24
"""Maximum number of steps whose tokens the page contains."""
SAMPLES: Final = 24
"""Maximum number of samples."""
SPANS: Final = 20_000
"""Maximum number of spans of all tracks together."""
TOKENS: Final = 60_000
"""Maximum number of tokens that the page contains."""
LOG_BYTES: Final = 2 << 20
"""Bytes that are read from the end of each file of the timeline: a page shows the last hours, the trace everything."""
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


def run_data(
    run_dir: Path, steps: range | None = None, *, is_served: bool = False, others: Sequence[Path] = ()
) -> dict[str, Any] | None:
    """Return the data of a run's page, or None if the run has no metrics yet.

    Args:
        run_dir: folder of the run.
        steps: steps whose tokens the page contains; None: a selection of all steps, up to `TOKENS` tokens.
        is_served: whether the page can request the tokens of a step, so that it contains none.
        others: folders of runs to compare it with.

    Raises:
        UsageError: it is not a run folder, none of the steps was logged, or another run has no metrics.
    """
    lines, bad_lines = read_lines(run_dir / "metrics.jsonl", is_metrics)
    samples, bad_samples = read_lines(run_dir / "samples.jsonl", is_group)
    try:
        resolved = load_run(run_dir)
        name, all_steps = resolved.name, resolved.config.steps
        facts = _facts(resolved.config, run_dir)
        notes = []
    except ArealError as error:  # a plugin of the run may not be installed here
        if not lines:
            raise
        name, all_steps = run_dir.absolute().name, lines[-1]["step"]
        facts = []
        notes = [f"the config cannot be read here: {error.message}"]
    if not lines:
        return None
    if bad_lines or bad_samples:
        notes.append(f"left out {bad_lines} lines of metrics.jsonl and {bad_samples} of samples.jsonl: unreadable")
    logged = [step for step in steps_of(run_dir) if steps is None or step in steps]
    if steps is not None and not logged:
        raise UsageError(f"no step of {steps.start}:{steps.stop} was logged")
    indexes = {step: _sequences(run_dir, step) for step in spread(logged, INDEXED_STEPS)}
    listed = {step: index for step, index in indexes.items() if index}
    if unreadable := indexes.keys() - listed.keys():
        notes.append(f"left out the tokens of the steps {sorted(unreadable)}: unreadable")
    sequences = [sequence for index in listed.values() for sequence in index]
    included: list[int] = []
    if not is_served:
        included = [*listed] if steps is not None else _included_steps(run_dir, [*listed])
    tracks, groups = read_timeline(run_dir / "logs", LOG_BYTES)
    data = {
        "name": name,
        "made_at": time.time(),
        "steps": all_steps,
        "facts": facts,
        "notes": notes,
        "others": [],
        "diagnostics": read_findings(run_dir),
        "config": RunFolder(run_dir).config.read_text(encoding="utf-8"),
        "charts": _charts(lines),
        "metrics": metrics_of(thinned(lines)),
        "sequences": {key: [sequence[key] for sequence in sequences] for key in INDEXED},
        "rollouts": {str(step): read_step(run_dir, step) for step in included},
        "rollout_steps": logged if is_served else included,
        "missing": f"areal view {run_dir} --steps A:B shows steps A to B - 1, --serve all steps",
        "columns": COLUMNS,
        "samples": spread(samples, SAMPLES),
        "in_flight": in_flight(groups),
        "timeline": {"tracks": [track._asdict() for track in latest(tracks, SPANS)]},
    }
    return compare(data, run_dir, others) if others else data


def page(data: dict[str, Any]) -> str:
    """Return the page as one HTML file that opens without a server.

    Args:
        data: data from `run_data`.
    """
    text = (STATIC / "view.html").read_text(encoding="utf-8")
    for file in FILES:
        text = text.replace(f"/*{file}*/", (STATIC / file).read_text(encoding="utf-8"))
    return text.replace("/*run*/", as_json(data))


def script_of(run_dir: Path, step: int) -> str:
    """Return the tokens of a step as a script that the page loads, from a server or a folder."""
    return f"arealRollouts({step}, {as_json(read_step(run_dir, step))});"


def write_report(run_dir: Path, steps: range | None = None, others: Sequence[Path] = ()) -> Path | None:
    """Write the page into a run folder. Return its path, or None if the run has no metrics yet.

    It is `report.html`, or `comparison.html` if there are other runs.

    Args:
        run_dir: folder of the run.
        steps: steps whose tokens the page contains; see `run_data`.
        others: folders of runs to compare it with.

    Raises:
        UsageError: it is not a run folder, or none of the steps was logged.
    """
    data = run_data(run_dir, steps, others=others)
    if data is None:
        return None
    path = run_dir / (COMPARISON_FILE if others else REPORT_FILE)
    hidden = path.with_name(f".{path.name}")  # keeps the old page if the disk is full
    hidden.write_text(page(data), encoding="utf-8")
    return hidden.replace(path)


def as_json(data: Any) -> str:
    """Return JSON for a script element: NaN and infinity become null, and no `<` can end the script."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _included_steps(run_dir: Path, steps: Sequence[int]) -> list[int]:
    """Return the steps whose tokens the page contains: spread over all steps, newest first up to `TOKENS`."""
    included: list[int] = []
    left = TOKENS
    for step in reversed(spread(steps, INLINE_STEPS)):  # newest first
        left -= token_count(run_dir, step)
        if left < 0:
            break
        included.insert(0, step)
    return included


def _sequences(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the sequences of a step; none if its file is damaged or was just removed by `thin_out`."""
    try:
        return read_index(run_dir, step)
    except (OSError, ValueError, LookupError):
        return []


def _facts(config: RunConfig, run_dir: Path) -> list[tuple[str, str]]:
    """Return the facts at the head of the page, as name and value."""
    model = config.model.path if config.model.source is None else config.model.source.reference
    facts = [
        ("model", str(model)),
        ("algorithm", config.algorithm.reference),
        ("data", config.dataset.reference),
        ("training", config.train_engine.reference),
    ]
    if config.inference_engine is not None:
        facts.append(("generation", config.inference_engine.reference))
    hardware = run_dir / HARDWARE_FILE
    if hardware.is_file():
        facts.append(("trainer", hardware.read_text(encoding="utf-8").strip()))
    return [*facts, ("run folder", str(run_dir.absolute()))]


def _charts(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the charts of the overview for which the run has metrics."""
    present = {key for line in lines for key in line}
    charts: list[dict[str, Any]] = [
        {"title": title, "text": text, "keys": [key for key in keys if key in present]} for title, text, keys in CHARTS
    ]
    for title, text, begin in STACKS:
        keys = [key for key in PHASES if key in present] if begin == "time/" else _shares(present, begin)
        charts.append({"title": title, "text": text, "keys": keys, "stacked": True})
    return [chart for chart in charts if chart["keys"]]


def _shares(present: set[str], begin: str) -> list[str]:
    return sorted((key for key in present if key.startswith(begin)), key=lambda key: int(key.rsplit("_", 1)[1]))
