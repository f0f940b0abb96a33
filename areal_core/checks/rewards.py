"""Compares the arguments of rewards with the keys of data rows, and calls the user's own rewards before a run.

Rewards of plugins have tests of their own and are not called. Neither are coroutine functions: they wait for others,
such as a judge model that may not be running yet.
"""

from __future__ import annotations

import difflib
import dis
import math
import signal
import sys
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from areal_core.checks.findings import reported
from areal_core.config.sections import reward_name
from areal_core.interfaces.workflow import REWARD_ARGUMENTS
from areal_core.rewards.scoring import RewardError, RewardSum, WeightedReward, reward_parameters

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from areal_core.checks.data import DataReport
    from areal_core.config import RunConfig, Selection

TRIAL_S: Final = 120
"""Seconds for a user's algorithm on one batch, and for importing and making a user's reward."""
_ANSWER: Final = "The answer is 42."
_OTHERS: Final = WeightedReward("others", lambda: 0.0)
"""Stands for the run's other rewards, so that the reward that is tried may abstain."""


def reward_arguments(chosen: Selection) -> dict[str, bool]:
    """Return the arguments of a reward that only a data row can supply, each with whether it is required."""
    target: Any = chosen.load()
    is_class = isinstance(target, type)
    function = partial(target.__call__, None) if is_class else partial(target, **chosen.keywords())
    names, _ = reward_parameters(function)
    return {name: is_required for name, is_required in names.items() if name not in REWARD_ARGUMENTS}


def argument_problems(arguments: Mapping[str, Mapping[str, bool]], reports: Sequence[DataReport]) -> Iterator[str]:
    """Yield the required arguments that a data row does not supply: no row of a data set, or a single row.

    Args:
        arguments: by the config key of a reward, its `reward_arguments`.
        reports: of the data sets that could be read.
    """
    for reward, report, missing in _missing_arguments(arguments, reports, is_required=True):
        listed = ", ".join(f"{name}{_suggestion(key)}" for name, key in missing.items())
        yield (
            f"{reward} needs {listed}: rewards get {', '.join(REWARD_ARGUMENTS)}, and the keys of the row, "
            f"which in {report.key} are {', '.join(report.keys)}"
        )
    for reward, names in arguments.items():
        for report in reports:
            for name, is_required in names.items():
                if is_required and (row := report.keys.get(name)):
                    yield (
                        f"{reward} needs {name}, which {row} lacks: add it to the row, or give the argument a default"
                    )


def default_rows(
    arguments: Mapping[str, Mapping[str, bool]], reports: Sequence[DataReport]
) -> Iterator[tuple[str, str]]:
    """Yield lines for the plan: arguments that keep their defaults, because no row of a data set supplies them.

    If rows have a key of a similar name, the line is a note: the default may hide a misspelling.

    Args:
        arguments: as in `argument_problems`.
        reports: as in `argument_problems`.
    """
    for reward, report, missing in _missing_arguments(arguments, reports, is_required=False):
        for name, key in missing.items():
            text = f"{reward}: no row of {report.key} fills {name}, so its default applies"
            yield ("note", f"{text}{_suggestion(key)}") if key else ("rewards", text)


def _missing_arguments(
    arguments: Mapping[str, Mapping[str, bool]], reports: Sequence[DataReport], *, is_required: bool
) -> Iterator[tuple[str, DataReport, dict[str, str]]]:
    """Yield by reward and data set the arguments that no row supplies, each with a key of a similar name if any."""
    for reward, names in arguments.items():
        for report in reports:
            others = {key.lower(): key for key in report.keys if key not in names}
            missing = {}
            for name, needed in names.items():
                if needed is is_required and name not in report.keys:
                    near = difflib.get_close_matches(name.lower(), others, n=1)
                    missing[name] = others[near[0]] if near else ""
            if missing:
                yield reward, report, missing


def _suggestion(key: str) -> str:
    return f" (did you mean the rows' '{key}'? Use the same name in both)" if key else ""


def reward_problems(config: RunConfig, reports: Iterable[DataReport]) -> Iterator[str]:
    """Call the user's own rewards on the first rows and a made-up answer. Yield what they raise or wrongly return.

    Errors of libraries are ignored: a server that the reward calls may not be running yet.

    Args:
        config: of the run.
        reports: of its data sets.
    """
    rows = [
        (f"row {number} of {report.title}", row) for report in reports for number, row in enumerate(report.first_rows)
    ]
    keys = {key for _, row in rows for key in row}
    for number, chosen in enumerate(config.rewards):
        is_own = chosen.record is None
        if is_own and all(name in keys for name, is_required in reward_arguments(chosen).items() if is_required):
            key, problems = f"rewards.{number}", list[str]()
            with reported(key, problems):
                problems += _reward_problem(key, chosen, config, rows)
            yield from problems


def _reward_problem(
    key: str, chosen: Selection, config: RunConfig, rows: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[str]:
    limit_s = math.ceil(config.rollout.reward_timeout_s)
    signal.signal(signal.SIGALRM, _raise_timeout)
    try:
        signal.alarm(max(limit_s, TRIAL_S))
        term = WeightedReward(reward_name(chosen), chosen.build())
        scored, abstained = 0, 0
        for place, row in rows if term.max_concurrency == 1 else ():
            sys.stderr.write(f"calling {key}: {chosen.target} on {place}\n")
            signal.alarm(limit_s)
            values = str(row.get("prompt", "")), _ANSWER, [1, 2], [1, 2, 3], "stop", row
            try:
                score = RewardSum([term, _OTHERS])(dict(zip(REWARD_ARGUMENTS, values, strict=True)))
            except RewardError as error:
                cause = error.__cause__
                if cause is None or (type(cause).__module__ == "builtins" and not isinstance(cause, OSError)):
                    yield f"{key}: {error}; tried on {place} and the answer '{_ANSWER}'"
                    break
            else:
                scored += term.name in score.components
                abstained += term.name not in score.components
        if abstained and not scored and (len(config.rewards) == 1 or _returns_nothing(term.function)):
            is_forgotten = _returns_nothing(term.function)
            reason = "it has no return with a value" if is_forgotten else "no other reward scores them"
            yield f"{key}: {chosen.target} returned None for the first {abstained} rows, and {reason}"
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _raise_timeout(number: int, frame: object) -> None:
    """Raise inside a reward that hangs, so that it is named. If it still hangs, the next alarm kills the child."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(TRIAL_S)
    raise RuntimeError("it took longer than rollout.reward_timeout_s")  # a TimeoutError is an OSError, which is ignored


def _returns_nothing(function: Any) -> bool:
    """Return whether a Python function has no return statement with a value, because its author forgot it."""
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    if code is None:
        return False
    ends = [pair for pair in pairwise(dis.get_instructions(code)) if pair[1].opname == "RETURN_VALUE"]
    constants = [i for i in dis.get_instructions(code) if i.opname == "RETURN_CONST"]  # Python 3.12 and later
    values = [before.opname == "LOAD_CONST" and before.argval is None for before, _ in ends]
    return all([*values, *(i.argval is None for i in constants)])
