"""Problems of a config as records: the key, the message, and hints for the correction. They never contain a secret."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from pydantic import ValidationError
    from pydantic.fields import FieldInfo

Path = tuple[str | int, ...]

MOST_TOLD: Final = 20
"""Problems that are reported for one section. A file that is not a config at all has thousands."""

_PLAIN_MESSAGES: Final = {
    "dict_type": "must be a mapping of keys to values",
    "list_type": "must be a list, in brackets",
    "float_parsing": "must be a number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_parsing": "must be true or false",
}
"""Messages for readers of a YAML file, by pydantic's kind of error. Pydantic's own are for programmers."""
_VALUE_IS_SHOWN: Final = re.compile(
    "bool_|int_|float_|greater_|less_|multiple_|literal_|enum|finite_|is_instance|list_"
)
"""Kinds of error that a secret cannot cause. Only for these does the message show the value."""


RENAMED: Final = {
    **dict.fromkeys(("num_generations", "n_samples", "n"), "rollout.group_size"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio_low"), "policy_loss.clip_low"),
    **dict.fromkeys(("beta", "kl_ctl", "kl_loss_coef"), "reference_kl"),
    **dict.fromkeys(("max_completion_length", "response_length"), "sampling.max_new_tokens"),
    **dict.fromkeys(("max_head_offpolicyness", "staleness_threshold"), "rollout.max_staleness"),
    **dict.fromkeys(("max_concurrent_rollouts", "max_inflight_tasks"), "rollout.max_pending_batches (of batches)"),
}
"""Keys of TRL, verl and AReaL, with areal's name for the same setting."""


@dataclass(frozen=True)
class Problem:
    """One problem of a config.

    Attributes:
        path: the keys that lead to it, such as `("rewards", 0, "weight")`.
        message: what is wrong.
        hints: lines that help to correct it.
    """

    path: Path
    message: str
    hints: tuple[str, ...] = ()

    def below(self, prefix: Sequence[str | int]) -> Problem:
        """Return the same problem with a path that starts further up in the tree."""
        return replace(self, path=(*prefix, *self.path))


class RejectedError(ValueError):
    """Carries problems through pydantic, which adds the path of the field whose validator raises this."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{dotted(problem.path)}: {problem.message}" for problem in self.problems))


def rejected(message: str, *hints: str) -> RejectedError:
    """Return the error for a `type` that names no component that can be chosen."""
    return RejectedError([Problem(("type",), message, hints)])


def dotted(path: Sequence[str | int]) -> str:
    """Return a path as overrides and errors write it, such as `rewards.0.weight`."""
    return ".".join(str(part) for part in path)


def from_validation(error: ValidationError, fields: Mapping[str, FieldInfo] | None = None) -> list[Problem]:
    """Return the problems in pydantic's error, at most `MOST_TOLD` of them and the number of further ones.

    Args:
        error: the error.
        fields: fields of the model that pydantic validated; None if it validated something else.
    """
    problems: list[Problem] = []
    details = error.errors(include_url=False)
    for detail in details[:MOST_TOLD]:
        path, kind = tuple(detail["loc"]), detail["type"]
        known = fields if fields and len(path) == 1 else {}
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, RejectedError):
            problems.extend(problem.below(path) for problem in cause.problems)
        elif kind == "extra_forbidden":
            problems.append(unknown_key(path, known))
        elif kind == "missing":
            description = known[str(path[-1])].description if known else None
            problems.append(Problem(path, "is required", (" ".join(description.split()),) if description else ()))
        elif kind == "model_type":
            hints = (f"keys here: {', '.join(sorted(fields))}",) if fields and not path else ()
            problems.append(Problem(path, "is a section with its own keys, not a single value", hints))
        else:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            message = _PLAIN_MESSAGES.get(kind, message)
            is_shown = _VALUE_IS_SHOWN.match(kind) and isinstance(detail["input"], str | int | float | None)
            problems.append(Problem(path, f"{message}, not {detail['input']!r}" if is_shown else message))
    if len(details) > MOST_TOLD:
        problems.append(Problem((), f"{len(details) - MOST_TOLD:,} more mistakes"))
    return problems


def unknown_key(path: Path, known: Iterable[str], owner: str = "") -> Problem:
    """Return the problem of an unknown key, with hints: the nearest key, areal's name for it, or all keys.

    Args:
        path: the keys that lead to it.
        known: keys that exist there.
        owner: name of the component, if it may have no settings at all.
    """
    names = sorted(known)
    key = str(path[-1])
    near = [name for name in names if "".join(part[:1] for part in name.split("_")) == key]  # lr for learning_rate
    near = [] if key in RENAMED and "_" in key else near or difflib.get_close_matches(key, names, n=1)
    hints = [f"did you mean '{near[0]}'?"] if near else []
    if key in RENAMED and not near:
        hints.append(f"areal calls it {RENAMED[key]}")
    if names and (not near or len(names) <= 12):
        hints.append(f"keys here: {', '.join(names)}")
    if owner and not names:
        hints.append(f"{owner} takes no settings")
    return Problem(path, "unknown key", tuple(hints))
