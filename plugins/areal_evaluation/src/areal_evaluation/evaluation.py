"""Run an evaluation without a trainer; `areal eval` calls it.

A separate process, the `evaluator`, runs the episodes and reports each one when it ends. All figures are computed from
these reports, so an evaluation can be interrupted at any time, and its results are kept if it fails.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import ValidationError

from areal_core.config import EvaluationSection
from areal_core.errors import RunError, UsageError
from areal_core.launchers import ProcessGroup
from areal_core.processes import private_folder
from areal_core.programs import RunFolder, check_evaluation, model_reference, print_error, rollout_groups, supervise
from areal_evaluation.figures import compute
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected
from areal_evaluation.progress import show_progress
from areal_evaluation.report import write_page

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from areal_core.config import Resolved
    from areal_evaluation.address import Address
    from areal_evaluation.progress import Show

SAMPLES_FILE, FIGURES_FILE, REPORT_FILE = "samples.jsonl", "evaluation.json", "report.html"
FACTS = ("evaluation", "workflow", "rewards", "sampling", "inference_engine", "seed", "deterministic")
"""Sections of the config that affect the figures, in addition to the model. The report contains them."""


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """Options of an evaluation that are not in the config.

    Attributes:
        address: endpoint of the model to evaluate, instead of the config's model.
        concurrency: maximum number of concurrent episodes; None: as many as in a run.
        category: key of the rows; figures are also reported for each of its values.
        ks: values of k for pass@k, each at most the number of samples.
        threshold: minimum reward of an episode that passes.
        output: new folder for figures, samples, report, config and logs.
    """

    address: Address | None = None
    concurrency: int | None = None
    category: str | None = None
    ks: Sequence[int] = (1,)
    threshold: float = 1.0
    output: Path | None = None


class Measured(NamedTuple):
    """Results of an evaluation that has ended.

    Attributes:
        figures: contents of `evaluation.json`.
        signal: number of the signal that interrupted it, or 0.
        failure: error that ended it early or kept a file from being written, or None.
    """

    figures: dict[str, Any]
    signal: int = 0
    failure: RunError | None = None


def for_evaluation(resolved: Resolved, model: Path | None = None, **overrides: float | None) -> Resolved:
    """Return the config with its `model` and `evaluation` sections changed for an evaluation.

    Args:
        resolved: config of any run that generates. Without an evaluation section its training prompts are used.
        model: Hugging Face folder that replaces the config's model.
        overrides: values for the evaluation section; None keeps the config's value.

    Raises:
        UsageError: the config generates nothing, or a value is out of range.
    """
    config = resolved.config
    if config.inference_engine is None or config.workflow is None:
        hint = "name a config that generates; --model FOLDER evaluates any model with it"
        raise UsageError(f"{resolved.name} generates nothing: it has no inference_engine and no workflow", hints=[hint])
    section = dict(config.evaluation or {"dataset": config.dataset})
    section |= {key: value for key, value in overrides.items() if value is not None}
    try:
        changes: dict[str, Any] = {"evaluation": EvaluationSection(**section)}
    except ValidationError as error:
        problems = [f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}" for fault in error.errors()]
        raise UsageError("; ".join(problems)) from None
    if model is not None:
        changes["model"] = config.model.model_copy(update={"path": str(model.resolve()), "source": None})
    return replace(resolved, config=config.model_copy(update=changes))


def read_categories(resolved: Resolved, key: str) -> dict[int, str]:
    """Return the value of a key for each row that is used, by the row's index.

    Raises:
        UsageError: a row has no such key or cannot be read.
    """
    section = resolved.config.evaluation
    assert section is not None
    categories: dict[int, str] = {}
    try:
        rows = section.dataset.build()
        for number in range(min(len(rows), section.limit or sys.maxsize)):
            row = rows[number]
            if key not in row:
                raise UsageError(f"row {number} (counted from 0) has no '{key}' for --category, only {', '.join(row)}")
            categories[number] = str(row[key])
    except UsageError:
        raise
    except Exception as error:  # a data set may raise anything
        message = f"--category {key}: {section.dataset.reference} cannot be read: {type(error).__name__}: {error}"
        raise UsageError(message) from error
    return categories


def evaluate(resolved: Resolved, options: EvaluationOptions) -> Measured:
    """Run all episodes and compute the figures.

    Args:
        resolved: config from `for_evaluation`.
        options: options of the evaluation.

    Raises:
        ConfigError: the model or the data cannot be read; nothing was started or written.
        RunError: all episodes failed, or the evaluation failed or was interrupted before an episode finished.
    """
    section, output = resolved.config.evaluation, options.output
    assert section is not None
    # Check the evaluation's data set only: the training data need not exist here.
    checked = resolved.config.model_copy(update={"dataset": section.dataset, "evaluation": None})
    check_evaluation(replace(resolved, config=checked), loads_model=options.address is None)
    categories = read_categories(resolved, options.category) if options.category is not None else {}
    resolved.plugins.events.configure(resolved.config)
    failure: RunError | None = None
    signals: list[int] = []
    with ExitStack() as stack:
        folder = RunFolder(output.resolve() if output is not None else stack.enter_context(private_folder()))
        starting = "loading the agent" if options.address is not None else "starting the engine"
        show = stack.enter_context(show_progress())
        episodes = Episodes(folder.path / SAMPLES_FILE, show, starting, categories)
        try:
            asyncio.run(_supervise(resolved, folder, episodes, options, signals))
        except RunError as error:
            if not episodes.finished:
                raise
            failure = error
        figures = compute_figures(resolved, episodes, options, signals)
        figures["model"] = options.address.model if options.address else model_reference(resolved, folder).path
    figures["stopped_by"] = failure and failure.message
    try:
        if episodes.refusal is not None:
            raise episodes.refusal
        if output is not None:
            (output / FIGURES_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            write_page(output / REPORT_FILE, figures, output / SAMPLES_FILE)
    except OSError as error:
        failure = failure or RunError(f"{output} cannot be written completely: {error.strerror or error}")
    return Measured(figures, signals[0] if signals else 0, failure)


class Episodes:
    """Collects the episodes of an evaluation as they end.

    Args:
        samples: file for the episodes with their texts, as JSON lines.
        show: shows the progress.
        starting: text that is shown before the first episode begins.
        categories: category of each row, if figures are reported by category.

    Attributes:
        expected: number of episodes; 0 until the engine is ready.
        lines: episodes that have ended, without their texts.
        refusal: first error of writing an episode to disk, or None.
    """

    def __init__(self, samples: Path, show: Show, starting: str, categories: Mapping[int, str] | None = None) -> None:
        self._samples = samples
        self._show = show
        self._starting = starting
        self._categories = categories or {}
        self.expected = 0
        self.refusal: OSError | None = None
        self.lines: list[dict[str, Any]] = []

    def on_message(self, message: Any) -> None:
        """Handle a message of the evaluator."""
        if isinstance(message, EpisodesExpected):
            self.expected = message.count
        elif isinstance(message, EpisodePlayed):
            line = dict(message.line)
            if self._categories:
                line["category"] = self._categories[line["row"]]
            try:
                with self._samples.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:  # keep the figures; `evaluate` reports the error at the end
                self.refusal = self.refusal or error
            self.lines.append({**line, "prompt": None, "completion": None, "conversations": None})

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Episodes that ended without an error."""
        return [line for line in self.lines if "reward" in line]

    def show(self, preparing: str = "") -> None:
        """Show the progress of the episodes, or of the model's preparation."""
        rewards = [line["reward"] for line in self.finished]
        failed = len(self.lines) - len(rewards)
        waiting = "generating" if self.expected else self._starting
        text = f"reward {fmean(rewards):.3f}" if rewards else waiting
        if failed:
            text += f", {failed} failed"
        self._show(preparing or text, len(self.lines), self.expected)


async def _supervise(
    resolved: Resolved, folder: RunFolder, episodes: Episodes, options: EvaluationOptions, signals: list[int]
) -> None:
    """Run the processes of an evaluation. Signals that interrupt it are appended to `signals`."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(resolved.to_yaml())
    except OSError as error:
        raise RunError(f"{folder.path} cannot be written: {error.strerror}") from error

    def log(text: str) -> None:
        if options.address is not None:  # show messages about agents' processes, which their authors need
            print_error(text)

    def update(preparation: str) -> None:
        episodes.show(f"preparing the model  {preparation}" if preparation else "")

    try:
        await supervise(
            resolved,
            folder,
            evaluation_groups(resolved, folder, options),
            "evaluator",
            on_message=episodes.on_message,
            update=update,
            log=log,
            signals=signals,
            prepares_model=options.address is None,
        )
        episodes.show()
    except RunError as error:
        if signals and not episodes.lines:  # interrupted while processes were started: there is nothing to report
            return
        error.hints = (*error.hints, "--output FOLDER keeps the logs of an evaluation")
        raise


def evaluation_groups(resolved: Resolved, folder: RunFolder, options: EvaluationOptions) -> list[ProcessGroup]:
    """Return the process that runs the episodes, and the processes that generate for it."""
    address = options.address and asdict(options.address)
    options_json = json.dumps({"concurrency": options.concurrency, "address": address})
    command = [sys.executable, "-m", "areal_evaluation.evaluator", str(folder.path), options_json]
    evaluator = ProcessGroup("evaluator", "evaluator", command)
    return [evaluator, *([] if options.address else rollout_groups(resolved.config, folder.path, "evaluator"))]


def compute_figures(
    resolved: Resolved, episodes: Episodes, options: EvaluationOptions, signals: Sequence[int] = ()
) -> dict[str, Any]:
    """Return the figures, with the config and the plugins that they were measured with.

    Raises:
        RunError: no episode finished.
    """
    lines = episodes.lines
    if not episodes.finished and signals:
        raise RunError("interrupted before the first episode ended", exit_code=128 + signals[0])
    if not lines:
        raise RunError("no episode ended")
    if not episodes.finished:
        raise RunError(f"all {len(lines)} episodes failed; the last one:\n{lines[-1]['error']}")
    return {
        "complete": len(lines) == episodes.expected,
        "episodes": episodes.expected,
        **compute(lines, options.ks, options.threshold),
        "category": options.category,
        "name": resolved.name,
        "endpoint": options.address and options.address.url,
        "config": resolved.config.model_dump(mode="json", include=set(FACTS)),
        "plugins": {record.name: record.version for record in resolved.provenance()},
    }
