"""A data set of one's own around another one: every problem stands behind the same worked examples, as a chat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from areal_core.config import Selection, Settings, component

if TYPE_CHECKING:
    from collections.abc import Mapping


class FewShotSettings(Settings):
    """Settings of `FewShot`."""

    problems: Selection = component("datasets", description="whose prompts are shown behind the examples")
    examples: list[tuple[str, str]] = Field(description="pairs of a question and the answer that is wished for")


class FewShot:
    """The rows of another data set, each with its prompt as the last message of a conversation."""

    Config = FewShotSettings

    def __init__(self, settings: FewShotSettings) -> None:
        self._problems = settings.problems.build()
        self._examples = [
            {"role": role, "content": content}
            for pair in settings.examples
            for role, content in zip(("user", "assistant"), pair, strict=True)
        ]

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = self._problems[index]
        return {**row, "prompt": [*self._examples, {"role": "user", "content": row["prompt"]}]}
