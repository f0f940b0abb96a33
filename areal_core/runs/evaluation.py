"""Evaluation without a trainer: composes the rollout half of a run around a data set.

`evaluate` is what `areal eval` calls. Engine, rewards and workflow live in a process of their own, the rollout
controller of an evaluation: `python -m areal_core.runs.evaluation FOLDER PARENT_PID`. It notes each episode in the folder
when it ends, and all figures are worked out from these notes, so that an evaluation may be stopped at any time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import defaultdict
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from areal_core.config import load_run
from areal_core.config.sections import EvaluationSection
from areal_core.errors import ArealError, RunError, UsageError
from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.runs.plan import make_plan
from areal_core.launchers.processes import end_with_parent, exit_description, last_lines
from areal_core.messages.channel import private_socket_path
from areal_core.rollout.pass_at_k import mean_over_prompts, mean_pass_at_k
from areal_core.runs.roles import SCRATCH_VARIABLE, build_engine, load_tokenizer, model_reference, sampling_parameters
from areal_core.runs.supervision import write_error

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence
    from typing import TextIO

    from areal_core.config import Resolved
    from areal_core.data import Episode

    Show = Callable[[str, int, int], object]
    """Takes words, how many episodes have ended, and how many there are; 0 where that is not known yet."""

GRACE_S = 20.0
POLL_S = 0.1
PLAIN_INTERVAL_S = 5.0
SAMPLES_FILE, TOTAL_FILE, STOP_FILE = "samples.jsonl", "total", "stop"
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
        raise UsageError("; ".join(f"{fault['loc'][0]}: {fault['msg']}" for fault in error.errors())) from None
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
    make_plan(replace(resolved, config=checked))
    resolved.plugins.events.configure(resolved.config)
    with private_socket_path() as socket:
        evaluation = _Evaluation(resolved, (output or socket.parent).resolve(), socket.parent)
        evaluation.run()
        figures = evaluation.figures(ks, threshold)
    if output is not None:
        (output / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    return figures, evaluation.signals[0] if evaluation.signals else 0


class _Evaluation:
    """The parent's side: starts the processes, follows what they note, and works out the figures.

    Args:
        resolved: made by `for_evaluation`.
        folder: where the config is read from, and where episodes and logs go.
        scratch: for sockets and for what the two sides tell each other; a short path.
    """

    def __init__(self, resolved: Resolved, folder: Path, scratch: Path) -> None:
        self._resolved = resolved
        self._folder = folder
        self._scratch = scratch
        self._episodes: list[dict[str, Any]] = []
        self._position = 0
        self.signals: list[int] = []
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda seen, _: self.signals.append(seen))

    def run(self) -> None:
        """Until every episode has ended, or a signal came.

        Raises:
            RunError: a process failed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "config.yaml").write_text(self._resolved.to_yaml())
        with _progress() as show:
            if self._resolved.config.model.source is not None:
                log = self._folder / "logs" / "prepare.log"
                words = ["areal_core.runs.roles", "prepare"]
                self._run_process("prepare", words, lambda: show(f"preparing the model  {last_lines(log, 1)}", 0, 0))
            if not self.signals:
                self._run_process("controller", ["areal_core.runs.evaluation"], lambda: self._look(show), GRACE_S)
            self._look(show)

    def _run_process(self, name: str, words: Sequence[str], look: Callable[[], object], grace_s: float = 0.0) -> None:
        launcher = self._resolved.config.launcher.build()
        arguments = ["-m", *words, str(self._folder), str(os.getpid())]
        deadline = math.inf
        try:
            variables = {SCRATCH_VARIABLE: str(self._scratch)}
            launcher.start([ProcessSpecification(name, arguments, variables)], self._folder)
            while name not in launcher.poll() and time.monotonic() < deadline and len(self.signals) < 2:
                if self.signals and deadline == math.inf:
                    (self._scratch / STOP_FILE).touch()
                    deadline = time.monotonic() + grace_s
                look()
                time.sleep(POLL_S)
            code = launcher.poll().get(name, 0)
        finally:
            launcher.stop(0)
        if code:
            raise self._failure(name, code)

    def _failure(self, name: str, code: int) -> RunError:
        hint = "--output FOLDER keeps the logs of an evaluation"
        path = self._folder / "error.json"
        if path.exists():
            noted = json.loads(path.read_text())
            return RunError(noted["message"], hints=[*noted["hints"], hint])
        words = last_lines(self._folder / "logs" / f"{name}.log")
        return RunError(f"{name} ended with {exit_description(code)}; the end of its log:\n{words}", hints=[hint])

    @property
    def _total(self) -> int:
        """How many episodes there will be; 0 before the engine is ready."""
        path = self._scratch / TOTAL_FILE
        return int(path.read_text() or 0) if path.exists() else 0

    def _look(self, show: Show) -> None:
        """Read the episodes that have ended since the last look, without their texts."""
        with suppress(FileNotFoundError), (self._folder / SAMPLES_FILE).open("rb") as file:
            file.seek(self._position)
            for line in file:
                if line.endswith(b"\n"):
                    self._position += len(line)
                    self._episodes.append({**json.loads(line), "prompt": None, "completion": None})
        rewards = [episode["reward"] for episode in self._episodes if "reward" in episode]
        failed = len(self._episodes) - len(rewards)
        words = f"reward {fmean(rewards):.3f}" if rewards else "generating" if self._total else "starting the engine"
        show(f"{words}, {failed} failed" if failed else words, len(self._episodes), self._total)

    def figures(self, ks: Sequence[int], threshold: float) -> dict[str, Any]:
        """What was measured, and of what.

        Raises:
            RunError: no episode ended well.
        """
        finished = [episode for episode in self._episodes if "reward" in episode]
        if not finished and self.signals:
            raise RunError("interrupted before the first episode ended", exit_code=128 + self.signals[0])
        if not finished:
            raise RunError(f"all {len(self._episodes)} episodes failed; the last one:\n{self._episodes[-1]['error']}")
        rewards, named = defaultdict(list), defaultdict(list)
        for episode in finished:
            rewards[episode["row"]].append(episode["reward"])
            for name, value in episode["rewards"].items():
                named[name].append(value)
        mean = mean_over_prompts([fmean(own) for own in rewards.values()], trials=len(finished) / len(rewards))
        passes = {str(k): mean_pass_at_k(rewards, k, threshold) for k in ks}
        seconds = max(episode["seconds"] for episode in self._episodes)
        tokens = [episode["tokens"] for episode in finished]
        return {
            "complete": len(self._episodes) == self._total,
            "episodes": self._total,
            "finished": len(finished),
            "failed": len(self._episodes) - len(finished),
            "reward": mean._asdict(),
            "threshold": threshold,
            "pass_at_k": {k: estimate and estimate._asdict() for k, estimate in passes.items()},
            "rewards": {name: fmean(values) for name, values in named.items()},
            "response_length": fmean(tokens),
            "truncated": fmean(episode["truncated"] for episode in finished),
            "seconds": seconds,
            "tokens_per_s": sum(tokens) / seconds,
            "episodes_per_s": len(self._episodes) / seconds,
            "name": self._resolved.name,
            "model": model_reference(self._resolved, self._folder).path,
            "config": self._resolved.config.model_dump(mode="json", include=set(FACTS)),
            "plugins": {record.name: record.version for record in self._resolved.provenance()},
        }


@contextmanager
def _progress() -> Iterator[Show]:
    """A bar on a terminal, a line every few seconds elsewhere; both on standard error, which no result is read from."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda words, done, total: bar.update(task, description=words, completed=done, total=total or None)
        return
    shown = -math.inf

    def show(words: str, done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > PLAIN_INTERVAL_S:
            shown = time.monotonic()
            sys.stderr.write(f"{f'{done}/{total} episodes  ' if total else ''}{words}\n")
            sys.stderr.flush()

    yield show


# The process in which episodes are run.


def main(arguments: Sequence[str]) -> int:
    """The rollout controller of an evaluation: FOLDER PARENT_PID."""
    folder, scratch = Path(arguments[0]), Path(os.environ[SCRATCH_VARIABLE])
    end_with_parent(int(arguments[1]))
    try:
        asyncio.run(_run_until(scratch / STOP_FILE, _run_episodes(folder, scratch)))
    except ArealError as error:
        write_error(folder, error)
        return error.exit_code
    return 0


async def _run_until(stop: Path, work: Coroutine[Any, Any, None]) -> None:
    """Run to the end, or until the file is there; what was begun is closed either way."""
    task = asyncio.create_task(work)
    while not task.done() and not stop.exists():
        await asyncio.wait({task}, timeout=POLL_S)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _run_episodes(folder: Path, scratch: Path) -> None:
    from areal_core.rollout.episodes import EpisodeError, EpisodeRunner
    from areal_core.rewards.pool import RewardPool

    resolved = load_run(folder)
    config, rollout, section = resolved.config, resolved.config.rollout, resolved.config.evaluation
    assert config.workflow is not None
    assert config.inference_engine is not None
    assert section is not None
    model = model_reference(resolved, folder)
    tokenizer = load_tokenizer(model)
    engine = build_engine(config, folder, scratch)
    scorer = RewardPool(folder, scratch, processes=rollout.reward_processes, timeout_s=rollout.reward_timeout_s)
    runner = EpisodeRunner(
        config.workflow.build(), engine, scorer, tokenizer, seed=config.seed, max_retries=rollout.max_retries
    )
    dataset = section.dataset.build()
    rows = min(len(dataset), section.limit or len(dataset))
    places = itertools.product(range(rows), range(section.samples_per_prompt))
    play = partial(runner.run, sampling=sampling_parameters(config, tokenizer, section.temperature), is_evaluation=True)

    async def work(file: TextIO, began: float) -> None:
        """Take one episode after another until there are no more."""
        for row, sample in places:
            try:
                async with asyncio.timeout(rollout.episode_timeout_s):
                    # Numbered as in the evaluations of a run, so that the random numbers are the same as well.
                    episode = await play(dataset[row], (row, -1), group=-1 - row, sample_index=sample)
                found = _description(episode, tokenizer)
            except (EpisodeError, TimeoutError) as error:
                found = {"error": str(error) or f"longer than rollout.episode_timeout_s: {rollout.episode_timeout_s:g}"}
            seconds = time.monotonic() - began
            file.write(json.dumps({"row": row, "sample": sample, "seconds": seconds, **found}) + "\n")

    try:
        await asyncio.gather(engine.start(model), scorer.start())
        (scratch / TOTAL_FILE).write_text(str(rows * section.samples_per_prompt))
        # As many at a time as a run of this config has.
        width = rollout.pipeline_depth * rollout.batch_size * rollout.group_size
        with (folder / SAMPLES_FILE).open("w", buffering=1) as file:
            began = time.monotonic()
            await asyncio.gather(*(work(file, began) for _ in range(width)))
    finally:
        await scorer.close()
        await engine.close()


def _description(episode: Episode, tokenizer: Any) -> dict[str, Any]:
    """An episode as it is noted. The completion is all that follows the first prompt, as the rewards see it."""
    from areal_core.data import FinishReason

    prompt, completions, count = "", [], 0
    for trajectory in episode.trajectories:
        tokens, sampled = (trajectory.tokens[key].tolist() for key in ("input_ids", "loss_mask"))
        begin = sampled.index(True) if any(sampled) else len(tokens)
        prompt = prompt or tokenizer.decode(tokens[:begin])
        completions.append(tokenizer.decode(tokens[begin:], skip_special_tokens=True))
        count += sum(sampled)
    return {
        "reward": episode.reward,
        "rewards": episode.rewards,
        "tokens": count,
        "truncated": int(episode.trajectories[-1].sequence.get("finish_reason", 0)) == FinishReason.LENGTH,
        "prompt": prompt,
        "completion": "\n".join(completions),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
