"""Evaluation without a trainer: what `areal eval` calls.

Episodes are played from a process of their own (`evaluator`), which tells of each when it ends. All figures are worked
out from that, so that an evaluation may be stopped at any time, and what it measured is kept when it fails.
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
from areal_evaluation.figures import work_out
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
"""The sections of the config that the figures depend on, beside the model."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What an evaluation is asked for beside its config.

    Attributes:
        address: of somebody else's model, in place of the config's.
        concurrency: episodes under way at a time; None for as many as in a run.
        category: key of the rows by whose value figures are given in groups as well.
        ks: of pass@k, each at most the number of samples.
        threshold: an episode passes when its reward reaches it.
        output: a new folder for figures, samples, report, config and logs.
    """

    address: Address | None = None
    concurrency: int | None = None
    category: str | None = None
    ks: Sequence[int] = (1,)
    threshold: float = 1.0
    output: Path | None = None


class Measured(NamedTuple):
    """An evaluation that has ended.

    Attributes:
        figures: as they stand in `evaluation.json`.
        signal: that ended it early, or 0.
        failure: that ended it early, or that kept something of it from being written.
    """

    figures: dict[str, Any]
    signal: int = 0
    failure: RunError | None = None


def for_evaluation(resolved: Resolved, model: Path | None = None, **given: float | None) -> Resolved:
    """The config with its `model` and `evaluation` sections as asked for.

    Args:
        resolved: of any run that generates; without an evaluation section its training prompts are used.
        model: a Hugging Face folder that takes the place of the config's model.
        given: values of the evaluation section; None leaves what the config says.

    Raises:
        UsageError: the config generates nothing, or a number is out of range.
    """
    config = resolved.config
    if config.inference_engine is None or config.workflow is None:
        hint = "name a config that generates; --model FOLDER evaluates any model with it"
        raise UsageError(f"{resolved.name} generates nothing: it has no inference_engine and no workflow", hints=[hint])
    section = dict(config.evaluation or {"dataset": config.dataset})
    section |= {key: value for key, value in given.items() if value is not None}
    try:
        changes: dict[str, Any] = {"evaluation": EvaluationSection(**section)}
    except ValidationError as error:
        told = [f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}" for fault in error.errors()]
        raise UsageError("; ".join(told)) from None
    if model is not None:
        changes["model"] = config.model.model_copy(update={"path": str(model.resolve()), "source": None})
    return replace(resolved, config=config.model_copy(update=changes))


def read_categories(resolved: Resolved, key: str) -> dict[int, str]:
    """What each row that is used has under a key, by the row's number.

    Raises:
        UsageError: a row has no such key, or cannot be read.
    """
    section = resolved.config.evaluation
    assert section is not None
    found: dict[int, str] = {}
    try:
        rows = section.dataset.build()
        for number in range(min(len(rows), section.limit or sys.maxsize)):
            row = rows[number]
            if key not in row:
                raise UsageError(f"row {number} (counted from 0) has no '{key}' for --category, only {', '.join(row)}")
            found[number] = str(row[key])
    except UsageError:
        raise
    except Exception as error:  # a data set is anybody's code
        message = f"--category {key}: {section.dataset.reference} cannot be read: {type(error).__name__}: {error}"
        raise UsageError(message) from error
    return found


def evaluate(resolved: Resolved, asked: Asked) -> Measured:
    """Run all episodes and work out the figures.

    Args:
        resolved: made by `for_evaluation`.
        asked: the same as there.

    Raises:
        ConfigError: the model or the data cannot be read; nothing was started or written.
        RunError: the engine failed, every episode failed, or none had ended well when it failed or was interrupted.
    """
    section, output = resolved.config.evaluation, asked.output
    assert section is not None
    # What would be trained on need not be there.
    checked = resolved.config.model_copy(update={"dataset": section.dataset, "evaluation": None})
    check_evaluation(replace(resolved, config=checked), loads_model=asked.address is None)
    categories = read_categories(resolved, asked.category) if asked.category is not None else {}
    resolved.plugins.events.configure(resolved.config)
    failure: RunError | None = None
    signals: list[int] = []
    with ExitStack() as stack:
        folder = RunFolder(output.resolve() if output is not None else stack.enter_context(private_folder()))
        starting = "loading the agent" if asked.address is not None else "starting the engine"
        show = stack.enter_context(show_progress())
        episodes = Episodes(folder.path / SAMPLES_FILE, show, starting, categories)
        try:
            asyncio.run(_supervise(resolved, folder, episodes, asked, signals))
        except RunError as error:
            if not episodes.finished:
                raise
            failure = error
        figures = work_out_figures(resolved, episodes, asked, signals)
        figures["model"] = asked.address.model if asked.address else model_reference(resolved, folder).path
    figures["stopped_by"] = failure and failure.message
    try:
        if episodes.refusal is not None:
            raise episodes.refusal
        if output is not None:
            (output / FIGURES_FILE).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
            write_page(output / REPORT_FILE, figures, output / SAMPLES_FILE)
    except OSError as error:
        failure = failure or RunError(f"{output} cannot be written, and lacks something: {error.strerror or error}")
    return Measured(figures, signals[0] if signals else 0, failure)


class Episodes:
    """The episodes of an evaluation, as they end.

    Args:
        samples: file for their texts.
        show: shows how it goes.
        starting: what is done before the first of them begins, in words.
        categories: of their rows, where such are asked for.

    Attributes:
        expected: how many there will be; 0 before the engine is ready.
        lines: those that have ended, without their texts.
        refusal: of the disk, to take one of them; None where it took all.
    """

    def __init__(self, samples: Path, show: Show, starting: str, categories: Mapping[int, str] | None = None) -> None:
        self._samples, self._show, self._starting, self._categories = samples, show, starting, categories or {}
        self.expected = 0
        self.refusal: OSError | None = None
        self.lines: list[dict[str, Any]] = []

    def on_message(self, said: Any) -> None:
        """The evaluator says something."""
        if isinstance(said, EpisodesExpected):
            self.expected = said.count
        elif isinstance(said, EpisodePlayed):
            line = dict(said.line)
            if self._categories:
                line["category"] = self._categories[line["row"]]
            try:
                with self._samples.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            except OSError as error:  # what was measured is told all the same
                self.refusal = self.refusal or error
            self.lines.append({**line, "prompt": None, "completion": None, "conversations": None})

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Those that ended well."""
        return [line for line in self.lines if "reward" in line]

    def show(self, preparing: str = "") -> None:
        """How it goes, in words and numbers; or how the model is being prepared."""
        rewards = [line["reward"] for line in self.finished]
        failed = len(self.lines) - len(rewards)
        words = f"reward {fmean(rewards):.3f}" if rewards else "generating" if self.expected else self._starting
        words += f", {failed} failed" if failed else ""
        self._show(preparing or words, len(self.lines), self.expected)


async def _supervise(
    resolved: Resolved, folder: RunFolder, episodes: Episodes, asked: Asked, signals: list[int]
) -> None:
    """Run the processes of an evaluation; the signals that interrupted it are added to a list."""
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        folder.config.write_text(resolved.to_yaml())
    except OSError as error:
        raise RunError(f"{folder.path} cannot be written: {error.strerror}") from error

    def log(text: str) -> None:
        if asked.address is not None:  # what agents do to their process is their author's business
            print_error(text)

    def update(preparation: str) -> None:
        episodes.show(f"preparing the model  {preparation}" if preparation else "")

    try:
        await supervise(
            resolved,
            folder,
            evaluation_groups(resolved, folder, asked),
            "evaluator",
            on_message=episodes.on_message,
            update=update,
            log=log,
            signals=signals,
            prepares_model=asked.address is None,
        )
        episodes.show()
    except RunError as error:
        if signals and not episodes.lines:  # interrupted while processes were started: there is nothing to report
            return
        error.hints = (*error.hints, "--output FOLDER keeps the logs of an evaluation")
        raise


def evaluation_groups(resolved: Resolved, folder: RunFolder, asked: Asked) -> list[ProcessGroup]:
    """The process that plays the episodes, and those that generate for it."""
    words = json.dumps({"concurrency": asked.concurrency, "address": asked.address and asdict(asked.address)})
    command = [sys.executable, "-m", "areal_evaluation.evaluator", str(folder.path), words]
    evaluator = ProcessGroup("evaluator", "evaluator", command)
    return [evaluator, *([] if asked.address else rollout_groups(resolved.config, folder.path, "evaluator"))]


def work_out_figures(
    resolved: Resolved, episodes: Episodes, asked: Asked, signals: Sequence[int] = ()
) -> dict[str, Any]:
    """What was measured, and of what.

    Raises:
        RunError: no episode ended well.
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
        **work_out(lines, asked.ks, asked.threshold),
        "category": asked.category,
        "name": resolved.name,
        "endpoint": asked.address and asked.address.url,
        "config": resolved.config.model_dump(mode="json", include=set(FACTS)),
        "plugins": {record.name: record.version for record in resolved.provenance()},
    }
