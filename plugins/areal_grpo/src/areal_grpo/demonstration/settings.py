"""Settings of the demonstration's parts."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component


class SplitSettings(Settings):
    """Which part of the problems."""

    split: Literal["train", "held_out"] = Field(default="train", description="they share no problem")


class AdditionLessonsSettings(Settings):
    """First only worked answers, then mostly direct ones."""

    rows: int = Field(default=51200, ge=1, description="how many lessons")
    worked_share: float = Field(default=0.75, ge=0, le=1, description="share of the rows, from the first, all worked")
    worked_later: float = Field(default=0.15, ge=0, le=1, description="share of worked answers among the others")
    seed: int = Field(default=0, ge=0, description="of the choice of problems")


class AdditionModelSettings(Settings):
    """The fine-tuned character model."""

    steps: int = Field(default=800, ge=1, description="of the fine-tuning, with 64 lessons each")
    seed: int = Field(default=0, ge=0, description="of the weights and of the lessons")
    experts: int = Field(
        default=0,
        ge=0,
        description="of an MoE in each layer, of which a token goes through two; 0: one MLP, as wide as two experts",
    )


class TaughtModelSettings(AdditionModelSettings):
    """The same model over characters, fine-tuned on lessons of yours."""

    lessons: Selection = component(
        "datasets", description="rows of prompt and completion, or of messages; 64 a step, in their order"
    )
    phrases: list[str] = Field(
        default_factory=list, description="texts that are one token each, such as marks of calls"
    )
