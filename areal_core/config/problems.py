"""Mistakes in a config as plain records: where, what, and how to mend it. Input values of secrets are never in them."""

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
"""Mistakes of one section that are told; a file that is something else altogether has thousands."""

_PLAINER: Final = {
    "dict_type": "must be a mapping of keys to values",
    "list_type": "must be a list, in brackets",
    "float_parsing": "must be a number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_parsing": "must be true or false",
}
"""What pydantic says in the words of a program."""
_VALUE_IS_SHOWN: Final = re.compile(
    "bool_|int_|float_|greater_|less_|multiple_|literal_|enum|finite_|is_instance|list_"
)
"""Kinds of mistake that a secret cannot make: only for these is the value that was written printed."""


RENAMED: Final = {
    **dict.fromkeys(("num_generations", "n_samples", "n"), "rollout.group_size"),
    **dict.fromkeys(("epsilon", "eps_clip", "clip_ratio_low"), "policy_loss.clip_low"),
    **dict.fromkeys(("beta", "kl_ctl", "kl_loss_coef"), "reference_kl"),
    **dict.fromkeys(("max_completion_length", "response_length"), "sampling.max_new_tokens"),
    **dict.fromkeys(("max_head_offpolicyness", "staleness_threshold"), "rollout.max_staleness"),
    **dict.fromkeys(("max_concurrent_rollouts", "max_inflight_tasks"), "rollout.max_pending_batches (of batches)"),
}
"""Keys of other frameworks, TRL, verl and AReaL, that areal knows under another name."""


@dataclass(frozen=True)
class Problem:
    """One mistake: the path of keys that leads to it, what is wrong, and lines that help."""

    path: Path
    message: str
    hints: tuple[str, ...] = ()

    def below(self, prefix: Sequence[str | int]) -> Problem:
        """The same mistake, seen from further up in the tree."""
        return replace(self, path=(*prefix, *self.path))


class RejectedError(ValueError):
    """Carries problems through pydantic, which knows the path to the field that raises this."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{dotted(problem.path)}: {problem.message}" for problem in self.problems))


def rejected(message: str, *hints: str) -> RejectedError:
    """The error for a `type` that names nothing which can be chosen."""
    return RejectedError([Problem(("type",), message, hints)])


def dotted(path: Sequence[str | int]) -> str:
    """A path as it is written in overrides and errors."""
    return ".".join(str(part) for part in path)


def from_validation(error: ValidationError, fields: Mapping[str, FieldInfo] | None = None) -> list[Problem]:
    """Every mistake that pydantic found, in words; `fields` are those of the model that it validated, if it was one."""
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
            problems.append(Problem(path, "is required", (f"it is: {description}",) if description else ()))
        elif kind == "model_type":
            hints = (f"keys here: {', '.join(sorted(fields))}",) if fields and not path else ()
            problems.append(Problem(path, "is a section with its own keys, not a single value", hints))
        else:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            message = _PLAINER.get(kind, message)
            shown = _VALUE_IS_SHOWN.match(kind) and isinstance(detail["input"], str | int | float | None)
            problems.append(Problem(path, f"{message}, not {detail['input']!r}" if shown else message))
    if len(details) > MOST_TOLD:
        problems.append(Problem((), f"{len(details) - MOST_TOLD:,} more mistakes"))
    return problems


def unknown_key(path: Path, known: Iterable[str], owner: str = "") -> Problem:
    """The mistake of a key that nothing reads, with the nearest ones that exist; `owner` is what may know none."""
    names = sorted(known)
    word = str(path[-1])
    near = [name for name in names if "".join(part[:1] for part in name.split("_")) == word]  # lr: learning_rate
    near = [] if word in RENAMED and "_" in word else near or difflib.get_close_matches(word, names, n=1)
    hints = [f"did you mean '{near[0]}'?"] if near else []
    if word in RENAMED and not near:
        hints.append(f"areal calls it {RENAMED[word]}")
    if names and (not near or len(names) <= 12):
        hints.append(f"keys here: {', '.join(names)}")
    if owner and not names:
        hints.append(f"{owner} takes no settings")
    return Problem(path, "unknown key", tuple(hints))
