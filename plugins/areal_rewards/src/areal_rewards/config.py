"""Settings of rewards and data sets. This module imports neither torch nor the libraries that they need."""

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
    """Settings of `mathematics.math_verify`, which has none."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("the reward math_verify", "math_verify", "math")


class FormatSettings(Settings):
    """Settings of `text.matches_format`."""

    pattern: Pattern = Field(description="Regular expression that the answer must match. A dot also matches line ends.")
    whole: bool = Field(
        default=True, description="Whether the whole answer must match. If false, a part of it is enough."
    )


class LengthPenaltySettings(Settings):
    """Settings of `text.length_penalty`."""

    longest: int = Field(
        ge=1, description="Length in tokens from which the penalty is -1, usually sampling.max_new_tokens."
    )
    margin: int = Field(ge=1, description="Number of tokens below `longest` over which the penalty grows from 0 to -1.")

    @model_validator(mode="after")
    def _check_order(self) -> LengthPenaltySettings:
        if self.margin > self.longest:
            raise ValueError("margin must be at most longest")
        return self

    def check(self, config: RunConfig) -> Iterable[str]:
        """Refuse a penalty that no completion can reach."""
        if self.longest - self.margin >= config.sampling.max_new_tokens:
            yield (
                f"length_penalty starts at {self.longest - self.margin} tokens, which no completion exceeds: "
                f"sampling.max_new_tokens is {config.sampling.max_new_tokens}; lower longest or raise margin"
            )


class JudgeSettings(Settings):
    """Settings of `judge.Judge`."""

    address: str = Field(
        pattern="^https?://",
        description="Base URL of the judge's OpenAI-compatible API, such as https://api.example.com/v1.",
    )
    model: str = Field(description="Name of the judge model at that address.")
    key: Secret | None = Field(default=None, description="API key of the judge, as env:NAME. null: none.")
    prompt: Template = Field(
        default="Here is a question and an answer to it.\n\n<question>\n{prompt}\n</question>\n\n<answer>\n"
        "{completion}\n</answer>\n\nThink about how good the answer is. End with a line 'Score: N', where N is a "
        "number from 0 (worthless) to 10 (perfect).",
        description="Template of the question to the judge, with {prompt}, {completion} and columns of the row.",
    )
    pattern: Pattern = Field(
        default=r"Score:\s*(-?\d+(?:\.\d+)?)",
        description="Regular expression that finds the verdict in the judge's answer. Its only group is the "
        "verdict, a number.",
    )
    lowest: float = Field(default=0.0, description="Verdict that gives a reward of 0.")
    highest: float = Field(default=10.0, description="Verdict that gives a reward of 1.")
    temperature: float = Field(default=0.0, ge=0, description="Sampling temperature of the judge. 0: greedy.")
    max_tokens: int = Field(default=1024, ge=1, description="Maximum number of tokens in an answer of the judge.")
    max_concurrency: int = Field(
        default=16, ge=1, description="Maximum number of concurrent requests of each reward process."
    )
    request_timeout_s: Seconds = Field(default=60.0, gt=0, description="Timeout of one request in seconds.")
    max_retries: int = Field(
        default=4,
        ge=0,
        description="Number of retries of a request when the judge is busy, fails or cannot be reached.",
    )
    cache: LocalPath | None = Field(
        default=None,
        description="File that caches the judge's answers for all processes and later runs. null: cache them in "
        "memory.",
    )
    input_price: float = Field(
        default=0.0, ge=0, description="Price of one million tokens that the judge reads, for the cost in metrics."
    )
    output_price: float = Field(
        default=0.0, ge=0, description="Price of one million tokens that the judge writes, for the cost in metrics."
    )

    @model_validator(mode="after")
    def _check_pattern_and_scale(self) -> JudgeSettings:
        if re.compile(self.pattern).groups != 1:
            raise ValueError("pattern must have exactly one group, the verdict")
        if self.lowest >= self.highest:
            raise ValueError("lowest must be below highest")
        return self

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed, and that a request can finish within the reward timeout."""
        yield from missing_library("the reward judge", "aiohttp", "judge")
        if self.request_timeout_s >= config.rollout.reward_timeout_s:
            yield (
                f"request_timeout_s is {self.request_timeout_s:g}, but rollout.reward_timeout_s, the limit for all "
                f"rewards of a completion, is {config.rollout.reward_timeout_s:g}: raise the latter, to about "
                f"{self.request_timeout_s * (self.max_retries + 1):g} to allow for retries"
            )


class RewardModelSettings(Settings):
    """Settings of `reward_models.RewardModel`."""

    path: str = Field(
        min_length=1,
        description="Reward model with one output: a Hugging Face folder, relative to the config, or a name on the "
        "hub.",
    )
    dtype: Literal["float32", "bfloat16"] = Field(default="float32", description="Number format of the reward model.")
    device: str = Field(
        default="cpu",
        pattern=r"^(cpu|cuda:\d+)$",
        description="Device on which each reward process computes: `cpu`, or a GPU such as `cuda:7` that placement "
        "does not use.",
    )
    same_tokens: bool = Field(
        default=True,
        description="Whether the reward model uses the policy's tokenizer, so that it can read the sampled tokens. "
        "false: tokenize the text of the answer again.",
    )

    @field_validator("path")
    @classmethod
    def _beside_config(cls, path: str, info: ValidationInfo) -> str:
        folder = TypeAdapter(LocalPath).validate_python(path, context=info.context)
        return str(folder) if folder.is_dir() else path

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed and the folder exists, unless the path may be a name on the hub."""
        yield from missing_library("the reward reward_model", "transformers", "models")
        if not Path(self.path).is_dir() and not HUB_NAME.fullmatch(self.path):
            yield f"there is no folder {self.path}; write the folder of a reward model, or OWNER/NAME on the hub"
        gpu = self.device.removeprefix("cuda:")
        if gpu in {str(gpu) for gpu in (*(config.placement.generation or ()), *(config.placement.training or ()))}:
            yield (
                f"device is cuda:{gpu}, which placement gives to servers or the trainer: choose another GPU or cpu, or "
                "serve the model with `areal serve_model` and use rewards/remote_reward_model"
            )

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Note that the memory plan does not include this model, because it knows only the GPUs of placement."""
        if self.device != "cpu":
            count = config.rollout.reward_processes
            yield f"{count} reward process(es) load the model on {self.device}; the memory plan does not include it"


class RemoteRewardModelSettings(Settings):
    """Settings of `reward_models.RemoteRewardModel`."""

    address: str = Field(pattern="^https?://", description="URL on which `areal serve_model` listens.")
    same_tokens: bool = Field(
        default=True,
        description="Whether the reward model uses the policy's tokenizer, so that it can read the sampled tokens. "
        "false: tokenize the text of the answer again.",
    )
    max_concurrency: int = Field(
        default=32, ge=1, description="Maximum number of concurrent requests of each reward process."
    )
    request_timeout_s: Seconds = Field(default=10.0, gt=0, description="Timeout of one request in seconds.")
    max_retries: int = Field(
        default=4,
        ge=0,
        description="Number of retries of a request when the server is busy, fails or cannot be reached.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("the reward remote_reward_model", "aiohttp", "judge")


class TaskScoreSettings(Settings):
    """Settings of `procedural.score_task`."""

    answer_tag: str | None = Field(
        default=None,
        pattern=r"^\w+$",
        description="Name of a tag. Only the content of the last `<tag>...</tag>` in the answer is scored. null: "
        "score the whole answer.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("the reward reasoning_gym", "reasoning_gym", "reasoning-gym")


class TableSettings(Settings):
    """Settings of a table: templates that make prompts and reference answers. Rewards can read all columns."""

    prompt: Template | None = Field(
        default=None,
        description="Template of the prompt, such as '{question}'. null: the column `prompt`, if there is one.",
    )
    answer: Template | None = Field(
        default=None,
        description="Template of the reference answer, such as '{solution}'. null: the column `answer`, if there is "
        "one.",
    )
    answer_after: str | None = Field(
        default=None,
        description="Keep only the part of the reference answer after the last occurrence of this text, such as "
        "'####'. null: keep all.",
    )
    completion: Template | None = Field(
        default=None,
        description="Template of the completion, for fine-tuning. null: the column `completion`, if there is one.",
    )
    limit: int | None = Field(default=None, ge=1, description="Number of rows to use, the first ones. null: all.")


class JSONLinesSettings(TableSettings):
    """Settings of `tables.JSONLinesDataset`."""

    paths: list[LocalPath] = Field(min_length=1, description="JSON Lines files, relative to the config.")


class FilesSettings(TableSettings):
    """Settings of `tables.FilesDataset`."""

    paths: list[LocalPath] = Field(min_length=1, description="Files of one format, relative to the config.")
    format: Literal["json", "parquet", "csv"] | None = Field(
        default=None,
        description="Format of the files. null: chosen by their endings. `json`: one object per line, or one array "
        "of objects; values are read exactly. `csv`: UTF-8, with the names of the columns in the first line. A "
        "column holds numbers if every cell is the plain spelling of one, such as 7 or 0.5; an empty cell is then "
        "null. Any other column is text as written: 007, 1e5, NA, True, and empty text. `parquet`: null fields of "
        "structs are removed; dates, times and decimals become text; images stay `{bytes, path}`.",
    )
    delimiter: str | None = Field(
        default=None,
        min_length=1,
        max_length=1,
        description="Character between the cells of a CSV file. null: a comma.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library for parquet files is installed, if there are any."""
        if self.format == "parquet" or (self.format is None and any(path.suffix == ".parquet" for path in self.paths)):
            yield from missing_library("the data set files", "datasets", "datasets")


class HubSettings(TableSettings):
    """Settings of `tables.HubDataset`."""

    name: str = Field(min_length=1, description="Name of the data set on the hub, such as openai/gsm8k, or a folder.")
    subset: str | None = Field(
        default=None, description="Configuration of the data set, if it has several. null: the default."
    )
    split: str = Field(default="train", description="Split to use, such as train, test or train[:90%].")
    revision: str | None = Field(
        default=None, description="Branch, tag or commit of the data set. null: the newest commit."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("the data set hub", "datasets", "datasets")


class ReasoningGymSettings(Settings):
    """Settings of `procedural.ReasoningGymDataset`."""

    task: str = Field(description="Task of reasoning-gym, such as basic_arithmetic.")
    size: int = Field(default=10_000, ge=1, le=10_000_000, description="Number of problems to generate.")
    seed: int = Field(
        default=0,
        ge=0,
        le=400,
        description="Random seed of the problems. No problem occurs under two seeds, so give held-out data a seed "
        "of its own.",
    )
    settings: dict[str, Any] = Field(
        default_factory=dict, description="Settings of the task itself, such as max_digits."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("the data set reasoning_gym", "reasoning_gym", "reasoning-gym")
