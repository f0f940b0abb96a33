"""Calling reward functions: their arguments, their sum, and the checks of what they return."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from areal_core.errors import line_of, writable
from areal_core.exports import renamed_method
from areal_core.interfaces.workflow import REWARD_ARGUMENTS, RewardScore, finite_number

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence


MAX_CONCURRENCY = 32
"""Completions that a coroutine function scores concurrently in one process. Its `max_concurrency` overrides this."""


class RewardError(Exception):
    """A reward function raised an exception, hung, crashed, or did not return a finite number.

    The episode counts as failed; its reward is never silently 0.
    """


class Scorer(Protocol):
    """Scores completions with all of a run's rewards."""

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """Return the weighted sum of the rewards and its components.

        Args:
            arguments: arguments of the reward functions by name, with the data row as `row`.

        Raises:
            RewardError: one of the rewards failed.
        """

    def pop_metrics(self) -> dict[str, float]:
        """Return the counters of the reward functions since the last call, such as `NAME/tokens`."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One reward of a run: a function, the name its values are logged under, and its weight in the sum."""

    name: str
    function: Callable[..., float | Awaitable[float | None] | None]
    weight: float = 1.0

    @property
    def max_concurrency(self) -> int:
        """Completions that the function may score concurrently: 1 unless it is a coroutine function."""
        function: Any = self.function
        if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
            return int(getattr(function, "max_concurrency", MAX_CONCURRENCY))
        return 1


class RewardSum:
    """The weighted sum of reward functions. Each function is called with the arguments that it names.

    A function that returns None abstains: it is neither in the sum nor among the components.
    """

    def __init__(self, terms: Sequence[WeightedReward]) -> None:
        for term in terms:
            renamed_method(type(term.function), "take_metrics", "pop_metrics")
        self._terms = [(term, reward_parameters(term.function)) for term in terms]

    @property
    def max_concurrency(self) -> int:
        """Completions that may be scored concurrently: 1 if no reward is a coroutine function."""
        return min((term.max_concurrency for term, _ in self._terms if term.max_concurrency > 1), default=1)

    def __call__(self, arguments: Mapping[str, Any]) -> RewardScore:
        """Score one completion with functions that are not coroutine functions.

        Raises:
            RewardError: a function raised an exception, lacks an argument, or did not return a finite number.
        """
        return self._sum([self._call(term, names, arguments) for term, names in self._terms])

    async def score(self, arguments: Mapping[str, Any]) -> RewardScore:
        """Score one completion, awaiting coroutine functions concurrently. Raises like a call."""
        values = [self._call(term, names, arguments) for term, names in self._terms]
        return self._sum(await asyncio.gather(*(_awaited(t, v) for (t, _), v in zip(self._terms, values, strict=True))))

    def pop_metrics(self) -> dict[str, float]:
        """See `Scorer.pop_metrics`. Rewards with a method `pop_metrics` have counters."""
        metrics: dict[str, float] = {}
        for term, _ in self._terms:
            take = getattr(term.function, "pop_metrics", dict)
            metrics |= {f"{term.name}/{key}": float(value) for key, value in take().items()}
        return metrics

    @staticmethod
    def _call(term: WeightedReward, parameters: tuple[Mapping[str, bool], bool], arguments: Mapping[str, Any]) -> Any:
        row, (names, takes_any) = arguments.get("row", {}), parameters
        wanted = (name for name, required in names.items() if required or name in arguments or name in row)
        values = dict(arguments) if takes_any else {}
        values |= {name: _argument(term, name, arguments, row) for name in wanted}
        try:
            return term.function(**values)
        except BaseException as error:  # sys.exit in a reward function must not end the process
            raise _raised(term, error) from error

    def _sum(self, values: Sequence[Any]) -> RewardScore:
        if not self._terms:
            raise RewardError("the workflow needs a reward, and the config has none: set rewards")
        pairs = zip(self._terms, values, strict=True)
        checked = [(term, _checked(term, value)) for (term, _), value in pairs if value is not None]
        if not checked:
            raise RewardError("every reward returned None for this answer: at least one must return a number")
        total = sum(term.weight * value for term, value in checked)
        return RewardScore(total, {term.name: value for term, value in checked})


async def _awaited(term: WeightedReward, value: Any) -> Any:
    """Return the value of a reward, after awaiting it if it is a coroutine."""
    if not inspect.isawaitable(value):
        return value
    try:
        return await value
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        raise _raised(term, error) from error


def _raised(term: WeightedReward, error: BaseException) -> RewardError:
    return RewardError(writable(f"reward '{term.name}' raised {type(error).__name__}: {error}{line_of(error)}"))


def reward_parameters(function: Callable[..., object]) -> tuple[dict[str, bool], bool]:
    """Return the arguments of a reward function.

    A keyword-only parameter with a default is a setting of the reward, and not an argument.

    Returns:
        The names of the arguments, each with whether it is required; and whether the function takes `**arguments`.
    """
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    offered = (p for p in named if p.default is p.empty or p.kind is p.POSITIONAL_OR_KEYWORD)
    return {p.name: p.default is p.empty for p in offered}, any(p.kind is p.VAR_KEYWORD for p in parameters)


def _argument(term: WeightedReward, name: str, arguments: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    for source in (arguments, row):
        if name in source:
            return source[name]
    if name in REWARD_ARGUMENTS:
        raise RewardError(
            f"reward '{term.name}' needs '{name}', which is not passed here: the workflow scores an answer with "
            f"{', '.join(arguments)}"
        )
    raise RewardError(
        f"reward '{term.name}' has a parameter '{name}', which is neither an argument of rewards "
        f"({', '.join(REWARD_ARGUMENTS)}) nor a key of the data row ({', '.join(row)}). If only some rows have it, "
        f"give the parameter a default: {name}=None"
    )


def _checked(term: WeightedReward, value: object) -> float:
    number = finite_number(value)
    if number is None:
        raise RewardError(
            f"reward '{term.name}' returned {value!r:.60} ({type(value).__name__}); it must return a finite number, or "
            "None to abstain"
        )
    return number
