"""Between texts and the spaces of gymnasium: what an observation says, and which action a completion names."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

LARGEST = 1000
"""Numbers in an observation; what has more is an image and no text."""
_NUMBER = re.compile(r"(?<![\w.])-?\d{1,18}(?!\w|\.\d)")
_LIST = re.compile(r"\[[^\[\]]{0,10000}\]")
_ARRAYS = ("Box", "MultiDiscrete", "MultiBinary")


class UnreadableError(Exception):
    """A completion names no action; the words are for the policy."""


def describe(space: Any, observation: Any) -> str:
    """An observation in words: texts as they are, numbers with four digits, parts of a mapping on a line each.

    Args:
        space: of gymnasium, that the observation is of.
        observation: as the game gave it.

    Raises:
        ConfigError: it is an image.
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
    """Reads actions out of what the policy says.

    Args:
        space: of gymnasium, of the game's actions.
        names: of actions, in words, for the policy; empty where it says numbers, lists or texts.

    Raises:
        ConfigError: a name stands for no action, or the space's actions cannot be said without names.
    """

    def __init__(self, space: Any, names: Mapping[str, Any]) -> None:
        self._space, self._kind = space, type(space).__name__
        self._names = {name.casefold(): self._as_action(value) for name, value in names.items()}
        for name, value in self._names.items():
            if not space.contains(value):
                raise ConfigError(f"actions: {name} is {names.get(name, value)}, which is not in {space}")
        if not names and self._kind not in {"Discrete", "Text", *_ARRAYS}:
            raise ConfigError(f"actions in {space} cannot be said: name those that the policy may take in `actions`")
        longest_first = sorted(self._names, key=len, reverse=True)
        self._name = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)")

    @property
    def choices(self) -> str:
        """What there is to say, in words."""
        if self._names:
            return "one of " + ", ".join(self._names)
        if self._kind == "Discrete":
            return f"a whole number from {self._space.start} to {self._space.start + self._space.n - 1}"
        if self._kind == "Text":
            return f"a text of {self._space.min_length} to {self._space.max_length} characters"
        return f"a list of {int(np.prod(self._space.shape))} numbers, as [1, 2]"

    def read(self, completion: str) -> Any:
        """The last action that a completion names.

        Raises:
            UnreadableError: there is none.
        """
        if self._names:
            found = self._name.findall(completion.casefold())
            if not found:
                raise UnreadableError(f"That names no action. Say {self.choices}.")
            return self._names[found[-1]]
        action = self._unnamed(completion)
        if action is None or not self._space.contains(action):
            raise UnreadableError(f"That is not an action. Say {self.choices}.")
        return action

    def _unnamed(self, completion: str) -> Any:
        if self._kind == "Text":
            return completion.strip()
        found = (_NUMBER if self._kind == "Discrete" else _LIST).findall(completion)
        try:
            return self._as_action(json.loads(found[-1])) if found else None
        except (ValueError, TypeError, RecursionError):
            return None

    def _as_action(self, value: Any) -> Any:
        if self._kind not in _ARRAYS:
            return value
        numbers = np.asarray(value, dtype=np.float64)
        if numbers.size != np.prod(self._space.shape) or not np.isfinite(numbers).all():
            return value
        if self._space.dtype.kind in "iu" and (np.abs(numbers) >= 2**31).any():
            return value  # what lies beyond it would come back as another number
        return numbers.reshape(self._space.shape).astype(self._space.dtype)
