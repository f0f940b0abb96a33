"""Settings of the demonstration's components."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from areal_core.config import Selection, Settings, component


class SplitSettings(Settings):
    """Settings of a data set with a training split and a held-out split."""

    split: Literal["train", "held_out"] = Field(
        default="train", description="Split of the data. The two splits share no problem."
    )


class AdditionLessonsSettings(Settings):
    """Settings of the lessons: first only answers with working, then mostly direct ones."""

    rows: int = Field(default=51200, ge=1, description="Number of rows, one lesson each.")
    worked_share: float = Field(
        default=0.75,
        ge=0,
        le=1,
        description="Share of the rows, the first ones, whose answers all show their working. From 0 to 1.",
    )
    worked_later: float = Field(
        default=0.15, ge=0, le=1, description="Share of answers with working among the remaining rows, from 0 to 1."
    )
    seed: int = Field(default=0, ge=0, description="Random seed for the choice of problems.")


class AdditionModelSettings(Settings):
    """Settings of the fine-tuned character model."""

    steps: int = Field(default=800, ge=1, description="Number of fine-tuning steps, with 64 lessons each.")
    seed: int = Field(default=0, ge=0, description="Random seed of the initial weights and the lessons.")
    experts: int = Field(
        default=0,
        ge=0,
        description="Number of experts in each MoE layer, two of which process each token. 0: one MLP, as wide as "
        "two experts.",
    )


class TaughtModelSettings(AdditionModelSettings):
    """Settings of the same character model, fine-tuned on your lessons."""

    lessons: Selection = component(
        "datasets",
        description="Data set to fine-tune on, with rows of prompt and completion, or of messages. Each step takes "
        "the next 64 rows.",
    )
    phrases: list[str] = Field(
        default_factory=list, description="Texts that become one token each, such as the tags of tool calls."
    )
