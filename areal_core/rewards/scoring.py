"""Calling reward functions: what they are given, and what may come back."""

from __future__ import annotations

import asyncio
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.errors import line_of, writable
from areal_core.interfaces.workflow import RewardScore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


MAX_CONCURRENCY = 32
"""Completions that a coroutine function scores at a time in one process; its own `max_concurrency` overrides it."""


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

    def take_metrics(self) -> dict[str, float]:
        """What rewards have counted since they were asked last, such as `NAME/tokens`."""


@dataclass(frozen=True, slots=True)
class RewardTerm:
    """One reward of a run: a function, the name its values are logged under, and its weight in the sum."""

    name: str
    function: Callable[..., float | Awaitable[float | None] | None]
    weight: float = 1.0

    @property
    def max_concurrency(self) -> int:
        """Completions that it may score at a time: 1, unless it is a coroutine function."""
        function: Any = self.function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return int(getattr(function, "max_concurrency", MAX_CONCURRENCY))
        return 1


class RewardSum:
    """The weighted sum of reward functions. Each is called with the arguments that it names.

    A reward that returns None abstains: it counts neither in the sum nor as a component.
    """

    def __init__(self, terms: Sequence[RewardTerm]) -> None:
        self._terms = [(term, reward_parameters(term.function)) for term in terms]

    @property
    def max_concurrency(self) -> int:
        """Completions that may be scored at a time; 1 where no reward is a coroutine function."""
        return min((term.max_concurrency for term, _ in self._terms if term.max_concurrency > 1), default=1)

    def __call__(self, arguments: Mapping[str, Any]) -> RewardScore:
        """Score one completion with rewards that are no coroutine functions.

        Raises:
            RewardError: a reward raised, lacks an argument, or did not return a finite number; the message names it.
        """
        return self._sum([self._call(term, names, arguments) for term, names in self._terms])

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """The same as a coroutine, in this very process; raises as a call does."""
        values = [self._call(term, names, arguments) for term, names in self._terms]
        return self._sum(await asyncio.gather(*(_awaited(t, v) for (t, _), v in zip(self._terms, values, strict=True))))

    def take_metrics(self) -> dict[str, float]:
        """See `Scorer.take_metrics`; asks the rewards that have a method of this name."""
        taken: dict[str, float] = {}
        for term, _ in self._terms:
            take = getattr(term.function, "take_metrics", dict)
            taken |= {f"{term.name}/{key}": float(value) for key, value in take().items()}
        return taken

    @staticmethod
    def _call(term: RewardTerm, parameters: tuple[Mapping[str, bool], bool], arguments: Mapping[str, Any]) -> Any:
        row, (names, takes_any) = arguments.get("row", {}), parameters
        wanted = (name for name, required in names.items() if required or name in arguments or name in row)
        given = dict(arguments) if takes_any else {}
        given |= {name: _argument(term, name, arguments, row) for name in wanted}
        try:
            return term.function(**given)
        except BaseException as error:  # sys.exit is no way out of a reward either
            raise _raised(term, error) from error

    def _sum(self, values: Sequence[Any]) -> RewardScore:
        if not self._terms:
            raise RewardError("the workflow asks for a reward, and the config names none: set rewards")
        given = zip(self._terms, values, strict=True)
        checked = [(term, _checked(term, value)) for (term, _), value in given if value is not None]
        if not checked:
            raise RewardError("every reward returned None for this answer, so nothing judges it: one must be a number")
        total = sum(term.weight * value for term, value in checked)
        return RewardScore(total, {term.name: value for term, value in checked})


async def _awaited(term: RewardTerm, value: Any) -> Any:
    """What a reward returned, waited for where it is a coroutine."""
    if not inspect.isawaitable(value):
        return value
    try:
        return await value
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _raised(term, error) from error


def _raised(term: RewardTerm, error: BaseException) -> RewardError:
    return RewardError(writable(f"reward '{term.name}' raised {type(error).__name__}: {error}{line_of(error)}"))


def reward_parameters(function: Callable[..., object]) -> tuple[dict[str, bool], bool]:
    """Return which arguments a reward is given.

    Returns:
        The names, and whether each must be there: a keyword-only parameter with a default is a setting. And whether
        the reward takes any others (`**arguments`).
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    offered = (p for p in named if p.default is p.empty or p.kind is p.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default is p.empty for p in offered}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _argument(term: RewardTerm, name: str, arguments: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    for source in (arguments, row):
        if name in source:
            return source[name]
    raise RewardError(
        f"reward '{term.name}' asks for '{name}', which is neither an argument of rewards ({', '.join(arguments)}) "
        f"nor a key of the data row ({', '.join(row)}). If only some rows have it, give it a default: {name}=None"
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
            f"reward '{term.name}' returned {value!r:.60} ({type(value).__name__}); it must return a finite number, or "
            "None to abstain"
        )
    return number
