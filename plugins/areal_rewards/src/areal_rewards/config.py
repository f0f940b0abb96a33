"""Settings of the rewards and data sets. Imports no torch and none of the libraries that they need."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationInfo, field_validator, model_validator

from areal_core.config import LocalPath, Seconds, Secret, Settings
from areal_rewards.libraries import missing_library
from areal_rewards.templates import columns_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


def _readable_template(template: str) -> str:
    columns_of(template)
    return template


def _readable_pattern(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"is not a regular expression: {error}") from None
    return pattern


Template = Annotated[str, AfterValidator(_readable_template)]
Pattern = Annotated[str, AfterValidator(_readable_pattern)]
HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


class MathVerifySettings(Settings):
    """`mathematics.math_verify` has none; it needs a library."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("the reward math_verify", "math_verify", "math")


class FormatSettings(Settings):
    """Settings of `text.matches_format`."""

    pattern: Pattern = Field(description="regular expression; a dot matches line ends too")
    whole: bool = Field(default=True, description="the whole completion must match, not only a part of it")


class LengthPenaltySettings(Settings):
    """Settings of `text.length_penalty`."""

    longest: int = Field(ge=1, description="tokens from which on the penalty is -1, usually sampling.max_new_tokens")
    margin: int = Field(ge=1, description="tokens before `longest` over which the penalty grows from 0 to -1")

    @model_validator(mode="after")
    def _ordered(self) -> LengthPenaltySettings:
        if self.margin > self.longest:
            raise ValueError("margin must be at most longest")
        return self

    def check(self, config: RunConfig) -> Iterable[str]:
        """A penalty that no completion can reach is a mistake."""
        if self.longest - self.margin >= config.sampling.max_new_tokens:
            yield (
                f"length_penalty begins at {self.longest - self.margin} tokens, which no completion exceeds: "
                f"sampling.max_new_tokens is {config.sampling.max_new_tokens}; lower longest or raise margin"
            )


class JudgeSettings(Settings):
    """Settings of `judge.Judge`."""

    address: str = Field(pattern="^https?://", description="OpenAI-compatible, such as https://api.example.com/v1")
    model: str = Field(description="the judge's name there")
    key: Secret | None = Field(default=None, description="env:NAME of the variable that holds the key")
    prompt: Template = Field(
        default="Here is a question and an answer to it.\n\n<question>\n{prompt}\n</question>\n\n<answer>\n"
        "{completion}\n</answer>\n\nThink about how good the answer is. End with a line 'Score: N', where N is a "
        "number from 0 (worthless) to 10 (perfect).",
        description="what the judge is asked; {prompt}, {completion} and columns of the row are filled in",
    )
    pattern: Pattern = Field(
        default=r"Score:\s*(-?\d+(?:\.\d+)?)", description="regular expression whose one group is the verdict"
    )
    lowest: float = Field(default=0.0, description="the verdict that is worth 0")
    highest: float = Field(default=10.0, description="the verdict that is worth 1")
    temperature: float = Field(default=0.0, ge=0, description="of the judge; 0 is greedy")
    max_tokens: int = Field(default=1024, ge=1, description="longest answer of the judge")
    max_concurrency: int = Field(default=16, ge=1, description="in each reward process")
    request_timeout_s: Seconds = Field(default=60.0, gt=0, description="seconds for one try")
    max_retries: int = Field(default=4, ge=0, description="tries again where the judge is busy, broken or gone")
    cache: LocalPath | None = Field(
        default=None, description="file that keeps answers for other processes and runs; null keeps them in memory"
    )
    input_price: float = Field(default=0.0, ge=0, description="of a million tokens that the judge reads")
    output_price: float = Field(default=0.0, ge=0, description="of a million tokens that the judge writes")

    @model_validator(mode="after")
    def _consistent(self) -> JudgeSettings:
        if re.compile(self.pattern).groups != 1:
            raise ValueError("pattern must have exactly one group, the verdict")
        if self.lowest >= self.highest:
            raise ValueError("lowest must be below highest")
        return self

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there, and a try must fit into the deadline of a reward."""
        yield from missing_library("the reward judge", "aiohttp", "judge")
        if self.request_timeout_s >= config.rollout.reward_timeout_s:
            yield (
                f"request_timeout_s is {self.request_timeout_s:g}, and all of a completion's rewards have "
                f"{config.rollout.reward_timeout_s:g} s: raise rollout.reward_timeout_s, with retries to some "
                f"{self.request_timeout_s * (self.max_retries + 1):g}"
            )


class RewardModelSettings(Settings):
    """Settings of `reward_models.RewardModel`."""

    path: str = Field(
        min_length=1,
        description="Hugging Face folder, relative to the config, or a name on the hub, of a model with a head of one "
        "output",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="number format of the model")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description="where each reward process computes: `cpu`, or a GPU such as `cuda:7` that placement does not name",
    )
    same_tokens: bool = Field(
        default=True, description="the policy's tokens are the reward model's; false tokenizes the answer's text again"
    )

    @field_validator("path")
    @classmethod
    def _beside_config(cls, path: str, info: ValidationInfo) -> str:
        folder = TypeAdapter(LocalPath).validate_python(path, context=info.context)
        return str(folder) if folder.is_dir() else path

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there, and the folder, where the path can be no name on the hub."""
        yield from missing_library("the reward reward_model", "transformers", "models")
        if not Path(self.path).is_dir() and not HUB_NAME.fullmatch(self.path):
            yield f"there is no folder {self.path}; name one with a reward model, or OWNER/NAME on the hub"
        gpu = self.device.removeprefix("cuda:")
        if gpu in {str(gpu) for gpu in (*(config.placement.generation or ()), *(config.placement.training or ()))}:
            yield (
                f"device is cuda:{gpu}, which placement gives to servers or the trainer: choose another GPU or cpu, or "
                "serve the model (areal serve_model) and ask it by rewards/remote_reward_model"
            )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """The plan of memory knows the GPUs of placement alone."""
        if self.device != "cpu":
            count = config.rollout.reward_processes
            yield f"{count} reward process(es) load the model on {self.device}, which the plan of memory does not count"


class RemoteRewardModelSettings(Settings):
    """Settings of `reward_models.RemoteRewardModel`."""

    address: str = Field(pattern="^https?://", description="where `areal serve_model` listens")
    same_tokens: bool = Field(
        default=True, description="the policy's tokens are the reward model's; false tokenizes the answer's text again"
    )
    max_concurrency: int = Field(default=32, ge=1, description="in each reward process")
    request_timeout_s: Seconds = Field(default=10.0, gt=0, description="seconds for one try")
    max_retries: int = Field(default=4, ge=0, description="tries again where the server is busy, broken or gone")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("the reward remote_reward_model", "aiohttp", "judge")


class TaskScoreSettings(Settings):
    """Settings of `procedural.score_task`."""

    answer_tag: str | None = Field(
        default=None,
        pattern=r"^\w+$",
        description="score what stands in the last <tag>...</tag> of the completion; null scores all of it",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("the reward reasoning_gym", "reasoning_gym", "reasoning-gym")


class TableSettings(Settings):
    """How the rows of a table become prompts and answers; its other columns travel along for rewards to read."""

    prompt: Template | None = Field(
        default=None, description="template such as '{question}'; null takes the column `prompt` where there is one"
    )
    answer: Template | None = Field(
        default=None, description="template such as '{solution}'; null takes the column `answer` where there is one"
    )
    answer_after: str | None = Field(
        default=None, description="of the answer keep what follows the last place where this stands, such as '####'"
    )
    completion: Template | None = Field(
        default=None,
        description="template, for fine-tuning; null takes the column `completion` where there is one",
    )
    limit: int | None = Field(default=None, ge=1, description="take only so many rows, the first; null takes all")


class JSONLinesSettings(TableSettings):
    """Settings of `tables.JSONLinesDataset`."""

    paths: list[LocalPath] = Field(min_length=1, description="files, relative to the config")


class FilesSettings(TableSettings):
    """Settings of `tables.FilesDataset`."""

    paths: list[LocalPath] = Field(min_length=1, description="files of one format, relative to the config")
    format: Literal["json", "parquet", "csv"] | None = Field(
        default=None,
        description="Format of the files; null goes by their endings. `json`: one object a line, or one array of "
        "objects; values are read exactly. `csv`: UTF-8, with the names of the columns in the first line. A column "
        "holds numbers if every cell is the plain spelling of one, such as 7 and 0.5; an empty cell is null there. Any "
        "other column is text as written: 007, 1e5, NA, True, and empty text. `parquet`: fields of structs that are "
        "null are removed; dates, times and decimals become text; images stay `{bytes, path}`.",
    )
    delimiter: str | None = Field(
        default=None, min_length=1, max_length=1, description="Sign between the cells of a CSV file. null: a comma."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Parquet needs a library."""
        if self.format == "parquet" or (self.format is None and any(path.suffix == ".parquet" for path in self.paths)):
            yield from missing_library("the data set files", "datasets", "datasets")


class HubSettings(TableSettings):
    """Settings of `tables.HubDataset`."""

    name: str = Field(min_length=1, description="name on the hub, such as openai/gsm8k, or a folder")
    subset: str | None = Field(default=None, description="the data set's configuration, where it has several")
    split: str = Field(default="train", description="such as train, test or train[:90%]")
    revision: str | None = Field(default=None, description="branch, tag or commit; null is the newest")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("the data set hub", "datasets", "datasets")


class ReasoningGymSettings(Settings):
    """Settings of `procedural.ReasoningGymDataset`."""

    task: str = Field(description="a task of reasoning-gym, such as basic_arithmetic")
    size: int = Field(default=10_000, ge=1, le=10_000_000, description="how many problems there are")
    seed: int = Field(
        default=0, ge=0, le=400, description="no problem is made twice under two numbers: give held-out data its own"
    )
    settings: dict[str, Any] = Field(default_factory=dict, description="the task's own settings, such as max_digits")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("the data set reasoning_gym", "reasoning_gym", "reasoning-gym")
