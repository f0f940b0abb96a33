"""Evaluation without a trainer: what `areal eval` calls.

Engine, rewards and workflow live in a process of their own (`evaluator`). It tells of each episode when it ends, and
all figures are worked out from that, so that an evaluation may be stopped at any time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from areal_core.config import EvaluationSection
from areal_core.errors import RunError, UsageError
from areal_core.interfaces import Needs, ProcessSpecification
from areal_core.messages import Credentials, private_folder
from areal_core.runs import RunFolder, RunState, Supervisor, make_plan, model_reference, role_process
from areal_evaluation.messages import EpisodePlayed, EpisodesExpected
from areal_evaluation.pass_at_k import mean_over_prompts, mean_pass_at_k
from areal_evaluation.progress import show_progress

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from areal_core.config import Resolved
    from areal_core.runs import SupervisedProcess
    from areal_evaluation.progress import Show

SAMPLES_FILE, FIGURES_FILE = "samples.jsonl", "evaluation.json"
FACTS = ("evaluation", "workflow", "rewards", "sampling", "inference_engine", "seed", "deterministic")
"""The sections of the config that the figures depend on, beside the model."""


def for_evaluation(
    resolved: Resolved, model: Path | None, samples: int | None, limit: int | None, temperature: float | None
) -> Resolved:
    """The config with its `model` and `evaluation` sections as asked for; None leaves what the config says.

    Args:
        resolved: of any run that generates; without an evaluation section its training prompts are used.
        model: a Hugging Face folder that takes the place of the config's model.
        samples: of each prompt.
        limit: prompts, from the first.
        temperature: of sampling; 0 is greedy.

    Raises:
        UsageError: the config generates nothing, or a number is out of range.
    """
    config = resolved.config
    if config.inference_engine is None or config.workflow is None:
        raise UsageError(
            f"{resolved.name} generates nothing: it has no inference_engine and no workflow",
            hints=["name a config that generates; --model FOLDER evaluates any model with it"],
        )
    given = {"samples_per_prompt": samples, "limit": limit, "temperature": temperature}
    base = dict(config.evaluation or {"dataset": config.dataset})
    try:
        section = EvaluationSection(**base | {key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        told = [f"{fault['loc'][0]}: {fault['msg'].removeprefix('Value error, ')}" for fault in error.errors()]
        raise UsageError("; ".join(told)) from None
    changes: dict[str, Any] = {"evaluation": section}
    if model is not None:
        changes["model"] = config.model.model_copy(update={"path": str(model.resolve()), "source": None})
    return replace(resolved, config=config.model_copy(update=changes))


def evaluate(
    resolved: Resolved, ks: Sequence[int], threshold: float, output: Path | None
) -> tuple[dict[str, Any], int]:
    """Run all episodes and work out the figures.

    Args:
        resolved: made by `for_evaluation`.
        ks: of pass@k, each at most the number of samples.
        threshold: an episode passes when its reward reaches it.
        output: a new folder for `evaluation.json`, `samples.jsonl`, the config and logs.

    Returns:
        The figures as they stand in `evaluation.json`, and the signal that ended the evaluation early, or 0.

    Raises:
        ConfigError: the model or the data cannot be read; nothing was started or written.
        RunError: the engine failed, every episode failed, or none had ended when it was interrupted.
    """
    section = resolved.config.evaluation
    assert section is not None
    # What would be trained on need not be there.
    checked = resolved.config.model_copy(update={"dataset": section.dataset, "evaluation": None})
    make_plan(replace(resolved, config=checked), trains=False)
    resolved.plugins.events.configure(resolved.config)
    with ExitStack() as stack:
        folder = output.resolve() if output is not None else stack.enter_context(private_folder())
        episodes = Episodes(folder / SAMPLES_FILE, stack.enter_context(show_progress()))
        signals = asyncio.run(_supervise(resolved, RunFolder(folder), episodes))
        figures = work_out_figures(resolved, episodes, ks, threshold, signals)
        figures["model"] = model_reference(resolved, RunFolder(folder)).path
    if output is not None:
        (output / FIGURES_FILE).write_text(json.dumps(figures, indent=1) + "\n")
    return figures, signals[0] if signals else 0


class Episodes:
    """The episodes of an evaluation, as they end.

    Args:
        samples: file for their texts.
        show: shows how it goes.

    Attributes:
        expected: how many there will be; 0 before the engine is ready.
        lines: those that have ended, without their texts.
    """

    def __init__(self, samples: Path, show: Show) -> None:
        self._samples = samples
        self._show = show
        self.expected = 0
        self.lines: list[dict[str, Any]] = []

    def hear(self, said: Any) -> None:
        """The evaluator says something."""
        if isinstance(said, EpisodesExpected):
            self.expected = said.count
        elif isinstance(said, EpisodePlayed):
            with self._samples.open("a") as file:
                file.write(json.dumps(dict(said.line)) + "\n")
            self.lines.append({**said.line, "prompt": None, "completion": None})

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Those that ended well."""
        return [line for line in self.lines if "reward" in line]

    def show(self) -> None:
        """How it goes, in words and numbers."""
        rewards = [line["reward"] for line in self.finished]
        failed = len(self.lines) - len(rewards)
        words = f"reward {fmean(rewards):.3f}" if rewards else "generating" if self.expected else "starting the engine"
        self._show(f"{words}, {failed} failed" if failed else words, len(self.lines), self.expected)

    def show_preparation(self, said: str) -> None:
        """The model is being prepared."""
        self._show(f"preparing the model  {said}", 0, 0)


async def _supervise(resolved: Resolved, folder: RunFolder, episodes: Episodes) -> list[int]:
    """Run the processes of an evaluation; the signals that interrupted it."""
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.config.write_text(resolved.to_yaml())

    def hear(_: SupervisedProcess, said: Any) -> None:
        episodes.hear(said)

    def prepare() -> None:
        episodes.show_preparation(preparation.preparation())

    preparation = RunState(folder)
    supervisor = Supervisor(resolved.config.launcher.build(), Credentials.create(1), folder.log, hear, lambda _: None)
    try:
        await supervisor.listen()
        await supervisor.bring_nodes(folder.path)
        steps: list[tuple[ProcessSpecification, Callable[[], None]]] = [(evaluator_process(folder), episodes.show)]
        if resolved.config.model.source is not None:
            steps.insert(0, (role_process("prepare", "preparer", folder.path), prepare))
        for specification, update in steps:
            if not supervisor.signals:
                process = supervisor.start(specification)
                await supervisor.watch(process, update)
                supervisor.forget(process)
        episodes.show()
        return supervisor.signals
    except RunError as error:
        error.hints = (*error.hints, "--output FOLDER keeps the logs of an evaluation")
        raise
    finally:
        await supervisor.close()


def evaluator_process(folder: RunFolder) -> ProcessSpecification:
    """The process that plays the episodes."""
    command = [sys.executable, "-m", "areal_evaluation.evaluator", str(folder.path)]
    return ProcessSpecification("evaluator", "evaluator", command, needs=Needs(cores=1), speaks=True)


def work_out_figures(
    resolved: Resolved, episodes: Episodes, ks: Sequence[int], threshold: float, signals: Sequence[int]
) -> dict[str, Any]:
    """What was measured, and of what.

    Raises:
        RunError: no episode ended well.
    """
    finished, lines = episodes.finished, episodes.lines
    if not finished and signals:
        raise RunError("interrupted before the first episode ended", exit_code=128 + signals[0])
    if not finished:
        raise RunError(f"all {len(lines)} episodes failed; the last one:\n{lines[-1]['error']}")
    rewards, named = defaultdict(list), defaultdict(list)
    for line in finished:
        rewards[line["row"]].append(line["reward"])
        for name, value in line["rewards"].items():
            named[name].append(value)
    mean = mean_over_prompts([fmean(own) for own in rewards.values()], trials=len(finished) / len(rewards))
    passes = {str(k): mean_pass_at_k(rewards, k, threshold) for k in ks}
    seconds = max(line["seconds"] for line in lines)
    tokens = [line["tokens"] for line in finished]
    return {
        "complete": len(lines) == episodes.expected,
        "episodes": episodes.expected,
        "finished": len(finished),
        "failed": len(lines) - len(finished),
        "reward": mean._asdict(),
        "threshold": threshold,
        "pass_at_k": {k: estimate and estimate._asdict() for k, estimate in passes.items()},
        "rewards": {name: fmean(values) for name, values in named.items()},
        "response_length": fmean(tokens),
        "truncated": fmean(line["truncated"] for line in finished),
        "seconds": seconds,
        "tokens_per_s": sum(tokens) / seconds,
        "episodes_per_s": len(lines) / seconds,
        "name": resolved.name,
        "config": resolved.config.model_dump(mode="json", include=set(FACTS)),
        "plugins": {record.name: record.version for record in resolved.provenance()},
    }
