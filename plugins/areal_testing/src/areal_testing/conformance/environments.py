"""Conformance suite of environments: a start from a row, an answer to any completion, independent episodes."""

from __future__ import annotations

import asyncio
import copy
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.sdk import read_step
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.sdk import StepResult

ODD_COMPLETIONS = (
    "",
    " ",
    "\n\n",
    "yes",
    "0",
    "-1e999",
    "{",
    "<|im_end|>",
    "</tool_call>",
    "é\u2028🙂",
    "\x00",
    "word " * 20_000,
)
"""Completions that a policy may write sooner or later."""


class EnvironmentSuite(ComponentSuite):
    """Tests of an environment. Set `component` (and `settings`), or override `make`; set `rows` and `completions`.

    Attributes:
        rows: data rows. Each starts an episode.
        completions: the policy's completions in the turns of an episode, for instance of a successful one.
        most_turns: number of turns after which a test stops an episode that has not ended.
    """

    kind: ClassVar[str] = "environments"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ({"prompt": "2 + 2 ="},)
    completions: ClassVar[Sequence[str]] = ("4", "5", "I do not know.")
    most_turns = 20

    def _play(self, environment: Any, row: Mapping[str, Any], completions: Sequence[str]) -> list[Any]:
        """Play one episode. Return the opening messages and the result of each turn."""

        async def play() -> list[Any]:
            transcript: list[Any] = [[dict(message) for message in await environment.reset(copy.deepcopy(dict(row)))]]
            for completion in completions[: self.most_turns]:
                result = read_step(environment, await environment.step(completion))
                _check(result, completion)
                transcript.append(result)
                if result.is_over:
                    break
            return transcript

        return asyncio.run(play())

    def test_it_opens_with_chat_messages(self) -> None:
        """`reset` returns messages with a role and a text. It returns none if the workflow uses the row's prompt."""
        for row in self.rows:
            for message in self._play(self.make(), row, ())[0]:
                description = f"a message of the opening is {message!r}"
                assert {"role", "content"} <= message.keys(), f"{description}: it needs role and content"
                assert all(isinstance(text, str) for text in message.values()), (
                    f"{description}: its values must be strings"
                )

    def test_it_answers_any_completion(self) -> None:
        """`step` returns an observation or the end, and a finite reward, for any completion. It raises no error."""
        for row in self.rows:
            for completion in (*self.completions, *ODD_COMPLETIONS):
                self._play(self.make(), row, [completion])

    def test_the_same_turns_have_the_same_outcome(self) -> None:
        """Two objects give the same results for a row: random choices follow from it, so siblings are comparable."""
        for row in self.rows:
            first, second = (self._play(self.make(), row, self.completions) for _ in range(2))
            assert first == second, f"two episodes with the same turns differ:\n{first}\n{second}"

    def test_the_row_is_left_as_it_was(self) -> None:
        """`reset` does not change the row, which the group's other episodes and the rewards use too."""
        for row in self.rows:
            passed = copy.deepcopy(dict(row))
            asyncio.run(self.make().reset(passed))
            assert passed == dict(row), "reset changed the row"

    def test_concurrent_episodes_are_independent(self) -> None:
        """Concurrent episodes, each with its own object, have the same turns as episodes that run alone."""

        async def play_together(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
            environments = [self.make() for _ in rows]
            transcripts: list[list[Any]] = []
            for environment, row in zip(environments, rows, strict=True):
                opening = await environment.reset(copy.deepcopy(dict(row)))
                transcripts.append([[dict(message) for message in opening]])
            running = list(range(len(rows)))
            for completion in self.completions[: self.most_turns]:
                for number in running.copy():
                    result = read_step(environments[number], await environments[number].step(completion))
                    transcripts[number].append(result)
                    if result.is_over:
                        running.remove(number)
            return transcripts

        rows = [*self.rows, *self.rows]
        alone = [self._play(self.make(), row, self.completions) for row in rows]
        assert asyncio.run(play_together(rows)) == alone, "an episode has other turns while others run"


def _check(result: StepResult, completion: str) -> None:
    call = f"step({completion[:40]!r}) returned {str(result)[:200]}"
    for message in () if isinstance(result.observation, str) else result.observation or ():
        assert {"role", "content"} <= message.keys(), f"{call}; a message needs role and content"
