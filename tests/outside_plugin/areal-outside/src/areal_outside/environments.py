"""An environment: one object for each episode."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.interfaces import RowError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_outside.config import GuessSettings


class Guess:
    """The policy guesses a number and is told in which direction to go on."""

    def __init__(self, settings: GuessSettings) -> None:
        self._settings = settings
        self._number, self._tries = 0, 0

    async def reset(self, row: Mapping[str, Any]) -> list[dict[str, str]]:
        """Begin with the question of the row."""
        if "answer" not in row:
            raise RowError(f"a row needs an answer; it has {', '.join(row)}")
        self._number, self._tries = int(row["answer"]), 0
        return [{"role": "user", "content": row["prompt"]}]

    async def step(self, completion: str) -> tuple[str | None, float]:
        """1 for the number, more for who knows it at once."""
        self._tries += 1
        text = completion.strip()
        guess = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None
        if guess == self._number:
            return None, 1.0 + (self._settings.bonus if self._tries == 1 else 0.0)
        if self._tries == self._settings.tries:
            return None, 0.0
        if guess is None:
            return "That is no number.", 0.0
        return "Too small." if guess < self._number else "Too large.", 0.0
