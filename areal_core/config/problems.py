"""Mistakes in a config as plain records: where, what, and how to mend it. Input values of secrets are never in them."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, get_args

from pydantic import BaseModel, ValidationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Path = tuple[str | int, ...]

_VALUE_IS_TOLD: Final = (
    "bool_", "int_", "float_", "greater_", "less_", "multiple_", "literal_", "enum", "finite_", "is_instance", "list_",
)  # fmt: skip
"""Kinds of mistake that a secret cannot make: only for these is the value that was found printed."""


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


def dotted(path: Sequence[str | int]) -> str:
    """A path as it is written in overrides and errors."""
    return ".".join(str(part) for part in path)


def from_validation(error: ValidationError, model: type[BaseModel] | None) -> list[Problem]:
    """Every mistake that pydantic found while it validated `model`, in words; None stands for a single value."""
    found: list[Problem] = []
    for detail in error.errors(include_url=False):
        path, kind = tuple(detail["loc"]), detail["type"]
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, RejectedError):
            found.extend(problem.below(path) for problem in cause.problems)
        elif kind == "extra_forbidden":
            found.append(unknown_key(path, _fields_at(model, path[:-1])))
        elif kind == "missing":
            found.append(Problem(path, "is required", _description(model, path)))
        else:
            message = detail["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
            told = kind.startswith(_VALUE_IS_TOLD) and isinstance(detail["input"], str | int | float | None)
            found.append(Problem(path, f"{message}, not {detail['input']!r}" if told else message))
    return found


def unknown_key(path: Path, known: Iterable[str]) -> Problem:
    """The mistake of a key that nothing reads, with the nearest ones that exist."""
    names = sorted(known)
    near = difflib.get_close_matches(str(path[-1]), names, n=1)
    hints = [f"did you mean '{near[0]}'?"] if near else []
    if names and (not near or len(names) <= 12):
        hints.append(f"keys here: {', '.join(names)}")
    return Problem(path, "unknown key", tuple(hints))


def _fields_at(model: type[BaseModel] | None, path: Path) -> list[str]:
    found = _model_at(model, path)
    return list(found.model_fields) if found else []


def _description(model: type[BaseModel] | None, path: Path) -> tuple[str, ...]:
    owner = _model_at(model, path[:-1])
    field = owner.model_fields.get(str(path[-1])) if owner else None
    return (f"it is: {field.description}",) if field and field.description else ()


def _model_at(model: type[BaseModel] | None, path: Path) -> type[BaseModel] | None:
    """The model that a path of field names leads to, through optional and list fields."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part) if model else None
        nested = _models_in(field.annotation) if field else []
        if len(nested) != 1:
            return None
        model = nested[0]
    return model


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in _models_in(argument)]
