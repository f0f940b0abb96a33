"""Conformance suite of rewards: a finite number for any completion."""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
import time
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ODD_COMPLETIONS = (
    "",
    " ",
    "\n\n\t",
    "\x00",
    "0",
    "-1e999",
    "nan",
    "1/0",
    "}}}{{{",
    r"\boxed{",
    r"\boxed{\frac{1}{",
    "(" * 500,
    "9" * 5000,
    "words " * 5000,
    "\uff0b\uff11\uff12\uff13",
    "مرحبا 🙂 \ud7ff",
    "<think>" * 200,
    "2**64 != 2^64",
)
"""Completions that an untrained model may write."""


class RewardSuite(ComponentSuite):
    """Tests of a reward. Set `component` (and `settings`), `row` and `examples`, or override `make`.

    Attributes:
        row: row of the data set that is passed to the reward.
        examples: pairs of a completion for that row and its expected reward.
        finish_reasons: finish reasons with which every completion is tried.
        seconds: seconds that one completion may take. A run has its own timeout.
    """

    kind: ClassVar[str] = "reward_functions"
    row: ClassVar[Mapping[str, Any]] = {"prompt": "What is 4 + 4?", "answer": "8"}
    examples: ClassVar[Sequence[tuple[str, float]]] = ()
    finish_reasons: ClassVar[Sequence[str]] = ("stop", "length")
    seconds = 60.0

    def score(self, completion: str, finish_reason: str = "stop") -> float:
        """Return the reward of a completion, called as in a run: with the parameters that it names."""
        return self._score(self.make(), completion, finish_reason)

    def _score(self, reward: Any, completion: str, finish_reason: str) -> float:
        ids = [ord(character) % 1000 for character in completion]
        prompt = self.row.get("prompt", "")
        arguments = {
            "prompt": prompt if isinstance(prompt, str) else str(prompt),
            "completion": completion,
            "completion_ids": ids,
            "finish_reason": finish_reason,
            "row": copy.deepcopy(dict(self.row)),
        }
        before = copy.deepcopy(arguments)
        number = asyncio.run(_value_of(reward, arguments))
        assert arguments == before, "the reward changed its arguments in place"
        return number

    def test_examples(self) -> None:
        """Each of `examples` has its expected reward."""
        if not self.examples:
            pytest.fail(f"{type(self).__name__} has no examples: set completions and their expected rewards")
        for completion, expected in self.examples:
            actual = self.score(completion)
            assert actual == pytest.approx(expected, abs=1e-6), (
                f"{completion!r} has the reward {actual}, not {expected}"
            )

    def test_any_completion_has_a_finite_reward(self) -> None:
        """The reward returns in time and raises no exception: a failed reward costs the whole group of answers."""
        reward = self.make()
        for completion in ODD_COMPLETIONS:
            for reason in self.finish_reasons:
                begin = time.monotonic()
                self._score(reward, completion, reason)
                duration = time.monotonic() - begin
                assert duration <= self.seconds, f"{completion[:40]!r} took {duration:.1f} s"

    def test_the_same_answer_has_the_same_reward(self) -> None:
        """The reward does not depend on the completions that it saw before."""
        reward = self.make()
        completions = [completion for completion, _ in self.examples] + list(ODD_COMPLETIONS)
        first = [self._score(reward, completion, "stop") for completion in completions]
        again = [self._score(reward, completion, "stop") for completion in reversed(completions)]
        assert again[::-1] == first, "the reward of an answer depends on what was scored before"


async def _value_of(reward: Any, arguments: Mapping[str, Any]) -> float:
    """Call a reward as a run does: with the parameters that it names, from the arguments and the row's keys."""
    available = {**arguments["row"], **arguments}
    parameters = list(inspect.signature(reward).parameters.values())
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    settings = {p.name for p in named if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}
    missing = [p.name for p in named if p.default is p.empty and p.name not in available]
    assert not missing, (
        f"the reward has parameters that are neither arguments of rewards nor keys of `row`: {', '.join(missing)}"
    )
    names = {p.name for p in named} - settings
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        names |= arguments.keys()
    value = reward(**{name: value for name, value in available.items() if name in names})
    value = await value if inspect.isawaitable(value) else value
    item = getattr(value, "item", None)  # a NumPy or PyTorch scalar
    number = item() if callable(item) else value
    is_finite = isinstance(number, int | float) and math.isfinite(number)
    assert is_finite, f"the reward returned {value!r:.60}, which is not a finite number"
    return float(number)
