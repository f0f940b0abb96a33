"""What an environment must do: begin from a row, answer whatever the policy says, and keep to its own episode."""

from __future__ import annotations

import asyncio
import copy
import math
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.sdk import read_step
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.sdk import StepResult

ODD = ("", " ", "\n\n", "yes", "0", "-1e999", "{", "<|im_end|>", "</tool_call>", "é\u2028🙂", "\x00", "word " * 20_000)
"""What a policy says, sooner or later."""


class EnvironmentSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`; say what it is played with.

    Attributes:
        rows: data rows that open an episode each.
        completions: what the policy says in the turns of an episode, for instance a good game of it.
        most_turns: an environment that has not ended by then is left.
    """

    kind: ClassVar[str] = "environments"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ({"prompt": "2 + 2 ="},)
    completions: ClassVar[Sequence[str]] = ("4", "5", "I do not know.")
    most_turns = 20

    def _play(self, environment: Any, row: Mapping[str, Any], completions: Sequence[str]) -> list[Any]:
        """The opening and all turns of one episode."""

        async def play() -> list[Any]:
            seen: list[Any] = [[dict(message) for message in await environment.reset(copy.deepcopy(dict(row)))]]
            for completion in completions[: self.most_turns]:
                result = read_step(environment, await environment.step(completion))
                _check(result, completion)
                seen.append(result)
                if result.is_over:
                    break
            return seen

        return asyncio.run(play())

    def test_it_opens_with_chat_messages(self) -> None:
        """With roles and texts; none at all where the workflow shall take the row's own."""
        for row in self.rows:
            for message in self._play(self.make(), row, ())[0]:
                words = f"a message of the opening is {message!r}"
                assert {"role", "content"} <= message.keys(), f"{words}: it needs role and content"
                assert all(isinstance(text, str) for text in message.values()), f"{words}: its values must be texts"

    def test_it_answers_whatever_the_policy_says(self) -> None:
        """By an observation or the end, and a finite reward: what a model writes is never the environment's error."""
        for row in self.rows:
            for completion in (*self.completions, *ODD):
                self._play(self.make(), row, [completion])

    def test_the_same_turns_have_the_same_outcome(self) -> None:
        """In an object of its own; what is random follows from the row, or groups compare unequal tasks."""
        for row in self.rows:
            first, second = (self._play(self.make(), row, self.completions) for _ in range(2))
            assert first == second, f"two episodes with the same turns differ:\n{first}\n{second}"

    def test_the_row_is_left_as_it_was(self) -> None:
        """Its siblings in the group, and the rewards, are given the same one."""
        for row in self.rows:
            given = copy.deepcopy(dict(row))
            asyncio.run(self.make().reset(given))
            assert given == dict(row), "reset changed the row"

    def test_episodes_at_the_same_time_do_not_meet(self) -> None:
        """Many are under way at once, each with an object of its own."""

        async def play_together(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
            environments = [self.make() for _ in rows]
            seen: list[list[Any]] = []
            for environment, row in zip(environments, rows, strict=True):
                opening = await environment.reset(copy.deepcopy(dict(row)))
                seen.append([[dict(message) for message in opening]])
            going = list(range(len(rows)))
            for completion in self.completions[: self.most_turns]:
                for number in going.copy():
                    result = read_step(environments[number], await environments[number].step(completion))
                    seen[number].append(result)
                    if result.is_over:
                        going.remove(number)
            return seen

        rows = [*self.rows, *self.rows]
        alone = [self._play(self.make(), row, self.completions) for row in rows]
        assert asyncio.run(play_together(rows)) == alone, "an episode has other turns when others are under way"


def _check(result: StepResult, completion: str) -> None:
    words = f"step({completion[:40]!r}) returned {str(result)[:200]}"
    for message in () if isinstance(result.observation, str) else result.observation or ():
        assert {"role", "content"} <= message.keys(), f"{words}; a message needs role and content"
    for name, number in {"the reward": result.reward, **result.info}.items():
        is_number = isinstance(number, int | float) and math.isfinite(number)
        assert is_number, f"{words}; {name} must be a finite number"
