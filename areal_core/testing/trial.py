"""The process in which a config's code is tried before a run: `python -m areal_core.testing.trial FOLDER`.

What is the user's own is called: rewards on the first rows, an algorithm on a made-up batch. What comes with a plugin
has tests of its own; a reward that is a coroutine waits for somebody else, and is not called.
"""

from __future__ import annotations

import dis
import json
import math
import os
import re
import signal
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from areal_core.config import CONFIG_FILE, load_run, public_environment, selections
from areal_core.config.problems import dotted
from areal_core.config.sections import reward_name
from areal_core.data import FinishReason, PackedBatch, Trajectory, shift_to_predictions
from areal_core.data.trajectory import Generation
from areal_core.driver.checking import import_problems, looks_at_rows, row_problems
from areal_core.driver.fingerprints import imported_modules
from areal_core.driver.plan import FIRST_ROWS
from areal_core.errors import RunError, line_of
from areal_core.files import KeptSources
from areal_core.interfaces.workflow import REWARD_ARGUMENTS
from areal_core.rewards.scoring import RewardError, RewardSum, RewardTerm, reward_parameters
from areal_core.runtime.folder import RunFolder
from areal_core.training.context import BatchContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.config import RunConfig, Selection
    from areal_core.interfaces import Algorithm

ANSWER = "The answer is 42."
OTHERS = RewardTerm("others", lambda: 0.0)
"""Stands for a run's other rewards: the one that is tried may abstain."""
ALARM_S = 120
"""For an algorithm on one batch; one that hangs ends this process."""
OF_ROLLOUTS = re.compile(r"[^']*'(reward\.|turn_rewards'|routed_experts')")
"""A `KeyError` for a column that rewards, workflows or engines bring, and the made-up batch does not have."""


def main(folder: Path) -> None:
    """Write beside the config what is wrong, which files were read (none where rows were encoded, or something was not
    tried), what was not tried, what rewards ask of rows, which modules of the user's own were imported, and notes on
    rows."""
    resolved = load_run(folder)
    config = resolved.config
    problems, files, asked = list(import_problems(resolved, folder)), {}, {}
    notes: list[str] = []
    row_notes: list[str] = []
    if not problems:
        shown = public_environment((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        hidden = {name: os.environ.pop(name) for name in os.environ.keys() - shown.keys()}
        problems = list(try_rewards(config))
        os.environ.update(hidden)
        problems += try_algorithm(config, notes)
        asked = {f"rewards.{number}": asked_of_rows(chosen) for number, chosen in enumerate(config.rewards)}
    if not problems and looks_at_rows(resolved):
        problems = list(row_problems(resolved, RunFolder(folder), row_notes))
    elif not problems and not notes:
        paths = {path for module in list(sys.modules.values()) if (path := getattr(module, "__file__", None))}
        files = {path: Path(path).stat().st_mtime_ns for path in paths if Path(path).is_file()}
    answer = [problems, files, "".join(notes), asked, imported_modules(resolved), row_notes]
    (folder / "answer.json").write_text(json.dumps(answer), encoding="utf-8")
    os._exit(0)  # threads and exit handlers of what was imported are nobody's concern


def _first_rows(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield the first rows of the training and the held-out data, each with its name in words; the plan reports a data
    set that cannot be read."""
    held_out = config.evaluation and config.evaluation.dataset
    for name, selection in (("the data set", config.dataset), ("evaluation.dataset", held_out)):
        with suppress(Exception):
            dataset = selection.build() if selection else ()
            yield from [(f"row {index} of {name}", dataset[index]) for index in range(min(len(dataset), FIRST_ROWS))]


def asked_of_rows(chosen: Selection) -> dict[str, bool]:
    """Return the arguments of a reward that a data row may fill, and whether the reward cannot be called without."""
    target: Any = chosen.load()
    is_class = isinstance(target, type)
    function = partial(target.__call__, None) if is_class else partial(target, **chosen.keywords())
    names, _ = reward_parameters(function)
    return {name: is_required for name, is_required in names.items() if name not in REWARD_ARGUMENTS}


def try_rewards(config: RunConfig) -> Iterator[str]:
    """What rewards of the user's own raise, or return that is no reward, asked about the first rows and an answer.

    What a library raises is not told: the judge that it asks may not be there yet.
    """
    own = [(number, chosen) for number, chosen in enumerate(config.rewards) if chosen.record is None]
    rows: Sequence[tuple[str, Mapping[str, Any]]] = [*_first_rows(config)] if own else ()
    keys = {key for _, row in rows for key in row}
    for number, chosen in own:
        if any(is_required and name not in keys for name, is_required in asked_of_rows(chosen).items()):
            continue  # of that the check tells
        limit_s = math.ceil(config.rollout.reward_timeout_s)
        signal.signal(signal.SIGALRM, _time_is_up)
        signal.alarm(max(limit_s, ALARM_S))  # importing and making it is no call, and a busy machine takes its time
        term = RewardTerm(reward_name(chosen), chosen.build())
        judged, abstained = 0, 0
        for place, row in rows if term.max_concurrency == 1 else ():
            sys.stderr.write(f"calling rewards.{number}: {chosen.target} on {place}\n")
            signal.alarm(limit_s)
            values = str(row.get("prompt", "")), ANSWER, [1, 2], [1, 2, 3], "stop", row
            try:
                score = RewardSum([term, OTHERS])(dict(zip(REWARD_ARGUMENTS, values, strict=True)))
                judged += term.name in score.components
                abstained += term.name not in score.components
            except RewardError as error:
                cause = error.__cause__
                if cause is None or (type(cause).__module__ == "builtins" and not isinstance(cause, OSError)):
                    yield f"rewards.{number}: {error}; tried on {place} and the answer '{ANSWER}'"
                    break
        if abstained and not judged and (len(config.rewards) == 1 or returns_nothing(term.function)):
            is_forgotten = returns_nothing(term.function)
            reason = "it has no return with a value" if is_forgotten else "no other reward judges them"
            yield f"rewards.{number}: {chosen.target} returned None for the first {abstained} rows, and {reason}"
    signal.alarm(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _time_is_up(number: int, frame: object) -> None:
    """Raise inside the reward that hangs, so that it is named; if that does not end it, the next alarm ends all."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(ALARM_S)
    raise RuntimeError("it took longer than rollout.reward_timeout_s")  # a TimeoutError is an OSError, which is excused


def returns_nothing(function: Any) -> bool:
    """Return whether a Python function has no return statement with a value, as one whose author forgot it."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return False
    ends = [pair for pair in pairwise(dis.get_instructions(code)) if pair[1].opname == "RETURN_VALUE"]
    constants = [i for i in dis.get_instructions(code) if i.opname == "RETURN_CONST"]  # Python 3.12 and later
    values = [before.opname == "LOAD_CONST" and before.argval is None for before, _ in ends]
    return all([*values, *(i.argval is None for i in constants)])


def try_algorithm(config: RunConfig, notes: list[str]) -> Iterator[str]:
    """What an algorithm with parts of the user's own raises, on a batch of the run's size, or computes that is no
    number. Added to `notes`, a line each: why it could not be tried to its end."""
    chosen = selections(config.algorithm, ("algorithm",))
    own = [f"{dotted(path)} ({each.target})" for path, each in chosen if each.record is None]
    algorithm = config.algorithm.build() if own else None
    if algorithm is None or algorithm.encode is not None:
        return
    if not dist.is_initialized():  # as on the trainer's only rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    sys.stderr.write(f"trying {', '.join(own)} on a made-up batch\n")
    signal.alarm(ALARM_S)
    try:
        _rehearse(algorithm, config)
    except _NoOutputError as error:
        notes.append(f"{', '.join(own)}: was not tried to its end, since nothing is known of the output {error}\n")
    except Exception as error:  # noqa: BLE001 - anybody's code
        told = error.message if isinstance(error, RunError) else f"{type(error).__name__}: {error}{line_of(error)}"
        if isinstance(error, KeyError):
            told += "; what a model says is there only where `needs` declares it"
        if isinstance(error, KeyError) and _may_be_brought(str(error), config):
            notes.append(f"{', '.join(own)}: was not tried to its end on a made-up batch: {told}\n")
        else:
            yield f"on a made-up batch: {told}; look at {', '.join(own)}"
    finally:
        signal.alarm(0)


def _may_be_brought(lacking: str, config: RunConfig) -> bool:
    """Whether a column may come with a run's rollouts: workflows of plugins and parts of the user's own may add any."""
    is_own = any(
        chosen.record is None
        for _, chosen in (*selections(config.inference_engine), *selections(config.algorithm))
        if chosen.kind in {"inference_engines", "reward_shaping", "group_filters"}
    )
    is_of_core = config.workflow is not None and config.workflow.target.startswith("core/")
    return is_own or not is_of_core or OF_ROLLOUTS.match(lacking) is not None


def _rehearse(algorithm: Algorithm, config: RunConfig) -> None:
    batch = _made_up(config.rollout.batch_size, config.rollout.group_size)
    if not algorithm.group_filters:
        batch["reward"][-config.rollout.group_size :] = 0.5  # divisions by a group's spread hide there
    context = BatchContext(config.training, _Models(), config.seed, config.steps, version=1)
    for works in algorithm.updates(algorithm.prepare(batch, context), context):
        for work in works:
            outputs = context.forward(work.role, work.batch, work.outputs)
            loss = work.loss(work.batch, {name: each.requires_grad_() for name, each in outputs.items()}).loss
            if not bool(loss.isfinite()):
                raise RunError(f"the loss of {work.role} is {loss.item()}")
            loss.backward()  # type: ignore[no-untyped-call]
            for name, each in outputs.items():
                if each.grad is not None and not bool(each.grad.isfinite().all()):
                    raise RunError(
                        f"the loss of {work.role} is {loss.item():g}, and its gradient for {name} is not finite"
                    )


class _Models(dict[str, Any]):
    """Engines of all roles, near to what sampled."""

    def __missing__(self, role: str) -> _Models:
        return self

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `TrainEngine.forward`; of wider outputs nothing is known (`_NoOutputError`)."""
        logprobs = batch["logprobs"] - 0.1 * torch.rand(batch.token_count, generator=torch.Generator().manual_seed(1))
        known = {"logprobs": logprobs, "entropy": -logprobs, "values": -logprobs, "divergence": -logprobs}
        if unknown := [name for name in outputs if name.partition(":")[0] not in known]:
            raise _NoOutputError(*unknown)
        return {name: known[name.partition(":")[0]].clone() for name in outputs}


class _NoOutputError(Exception):
    """An output that is wider than one number a token."""


def _made_up(groups: int, siblings: int) -> PackedBatch:
    """A batch as the trainer hands it to an algorithm."""
    number, same = torch.arange(groups * siblings), torch.zeros(groups * siblings, dtype=torch.int64)
    sampled = [range(1 + row * 7 % 9) for row in number.tolist()]
    written = [Generation(ids, [-0.5] * len(ids), [0] * len(ids), FinishReason.STOP) for ids in sampled]
    batch = PackedBatch.from_trajectories([Trajectory.from_generation([1, 2, 3], one) for one in written])
    group = number // siblings
    ids = {"group_id": group, "episode_id": number, "sample_index": number % siblings, "part_index": same}
    ids |= {"agent_id": same, "prompt_id": torch.stack([group, same], 1)}
    return shift_to_predictions(batch.with_sequences(reward=(number * 7 % 11).float() / 10, **ids))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        KeptSources.use(Path(sys.argv[2]), renews=True)
    main(Path(sys.argv[1]))
