"""Calling reward functions: what they are given, and what may come back."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.interfaces.workflow import RewardScore

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


class RewardError(Exception):
    """A reward function failed, hung, died or returned something that is not a finite number.

    The episode counts as failed; it never gets a silent 0.
    """


class Scorer(Protocol):
    """Scores completions with all of a run's rewards."""

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """The weighted sum and its components.

        Raises:
            RewardError: one of the rewards failed.
        """


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One reward of a run: a function, the name its values are logged under, and its weight in the sum."""

    name: str
    function: Callable[..., float]
    weight: float = 1.0


class RewardSum:
    """Weighted sum of reward functions; calls each with those of the arguments that it names."""

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        self._terms = [(term, _parameters(term.function)) for term in terms]

    def __call__(self, arguments: Mapping[str, Any]) -> RewardScore:
        """Score one completion.

        Raises:
            RewardError: a reward raised, lacks an argument, or did not return a finite number; the message names it.
        """
        if not self._terms:
            raise RewardError("the workflow asks for a reward, and the config names none: set rewards")
        row = arguments.get("row", {})
        total, components = 0.0, {}
        for term, names in self._terms:
            given = arguments if names is None else {name: _argument(term, name, arguments, row) for name in names}
            try:
                value = term.function(**given)
            except BaseException as error:  # sys.exit is no way out of a reward either
                raise RewardError(f"reward '{term.name}' raised {type(error).__name__}: {error}") from error
            components[term.name] = _checked(term, value)
            total += term.weight * components[term.name]
        return RewardScore(total, components)

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """The same as a coroutine, in this very process: for rewards that neither block nor crash."""
        return self(arguments)


def _parameters(function: Callable[..., float]) -> list[str] | None:
    """Names of the arguments to pass, or None where the function takes any (`**arguments`)."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.default is p.empty]


def _argument(term: RewardTerm, name: str, arguments: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    for source in (arguments, row):
        if name in source:
            return source[name]
    raise RewardError(
        f"reward '{term.name}' asks for '{name}', which is neither an argument of rewards ({', '.join(arguments)}) "
        f"nor a key of the data row ({', '.join(row)})"
    )


def finite_number(value: object) -> float | None:
    """A number as a float, also a scalar of NumPy or PyTorch; None for anything else, NaN and infinity."""
    if not isinstance(value, bool | int | float):
        item = getattr(value, "item", None)
        try:
            value = item() if callable(item) else None
        except (TypeError, ValueError, RuntimeError):  # of many elements
            return None
    if not isinstance(value, bool | int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _checked(term: RewardTerm, value: object) -> float:
    number = finite_number(value)
    if number is None:
        raise RewardError(
            f"reward '{term.name}' returned {value!r:.60} ({type(value).__name__}); it must return a finite number"
        )
    return number
