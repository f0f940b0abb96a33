"""Convert between text and gymnasium's spaces: describe observations, read actions out of completions."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST = 1000
"""Maximum number of numbers in an observation. A larger one is an image and cannot be written as text."""
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)")
_LIST = re.compile(r"\[[^\[\]]{0,10000}\]")
_ARRAYS = ("Box", "MultiDiscrete", "MultiBinary")


class UnreadableError(Exception):
    """A completion names no action. The message is for the policy."""


def describe(space: Any, observation: Any) -> str:
    """Return an observation as text: strings unchanged, numbers with four digits, a line for each entry of a Dict.

    Args:
        space: gymnasium space of the observation.
        observation: value from the game.

    Raises:
        ConfigError: the observation has more than `LARGEST` numbers, such as an image.
    """
    kind = type(space).__name__
    if kind == "Dict":
        return "\n".join(f"{name}: {describe(space[name], observation[name])}" for name in space.spaces)
    if kind == "Tuple":
        return ", ".join(describe(part, value) for part, value in zip(space.spaces, observation, strict=True))
    if kind in _ARRAYS:
        numbers = np.asarray(observation)
        if numbers.size > LARGEST:
            raise ConfigError(
                f"an observation of {numbers.size} numbers is not a text",
                hints=["describe: mine.py:describe, or observation: rendering where the game has a text of it"],
            )
        return " ".join(f"{number:.4g}" for number in numbers.astype(np.float64).ravel())
    return str(observation)


class ActionReader:
    """Reads actions out of the policy's completions.

    Args:
        space: gymnasium space of the game's actions.
        names: action values by the names that the policy writes. Empty: the policy writes numbers, lists or text.

    Raises:
        ConfigError: a named value is not in the space, or the space's actions cannot be written without names.
    """

    def __init__(self, space: Any, names: Mapping[str, Any]) -> None:
        self._space, self._kind = space, type(space).__name__
        self._names = {name.casefold(): self._as_action(value) for name, value in names.items()}
        for name, value in self._names.items():
            if not space.contains(value):
                raise ConfigError(f"actions: {name} is {names.get(name, value)}, which is not in {space}")
        if not names and self._kind not in {"Discrete", "Text", *_ARRAYS}:
            raise ConfigError(f"actions in {space} cannot be written as text: name the allowed actions in `actions`")
        longest_first = sorted(self._names, key=len, reverse=True)
        self._name = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    @property
    def choices(self) -> str:
        """Description of the possible actions, for the policy."""
        if self._names:
            return "one of " + ", ".join(self._names)
        if self._kind == "Discrete":
            return f"a whole number from {self._space.start} to {self._space.start + self._space.n - 1}"
        if self._kind == "Text":
            return f"a text of {self._space.min_length} to {self._space.max_length} characters"
        return f"a list of {int(np.prod(self._space.shape))} numbers, as [1, 2]"

    def read(self, completion: str) -> Any:
        """Return the last action that a completion names.

        Raises:
            UnreadableError: it names none.
        """
        if self._names:
            matches = self._name.findall(completion.casefold())
            if not matches:
                raise UnreadableError(f"That names no action. Say {self.choices}.")
            return self._names[matches[-1]]
        action = self._unnamed(completion)
        if action is None or not self._space.contains(action):
            raise UnreadableError(f"That is not an action. Say {self.choices}.")
        return action

    def _unnamed(self, completion: str) -> Any:
        if self._kind == "Text":
            return completion.strip()
        matches = (_NUMBER if self._kind == "Discrete" else _LIST).findall(completion)
        try:
            return self._as_action(json.loads(matches[-1])) if matches else None
        except (ValueError, TypeError, RecursionError):
            return None

    def _as_action(self, value: Any) -> Any:
        if self._kind not in _ARRAYS:
            return value
        numbers = np.asarray(value, dtype=np.float64)
        if numbers.size != np.prod(self._space.shape) or not np.isfinite(numbers).all():
            return value
        if self._space.dtype.kind in "iu" and (np.abs(numbers) >= 2**31).any():
            return value  # beyond int32 the cast would wrap to another number
        return numbers.reshape(self._space.shape).astype(self._space.dtype)
