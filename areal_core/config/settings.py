"""The base classes of all settings models, of the core and of plugins, and the type of a secret."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import core_schema

from areal_core.config.problems import RejectedError, from_validation
from areal_core.errors import ConfigError
from areal_core.proxies import bypass_proxies

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.interfaces.algorithm import ForwardPass
    from areal_core.interfaces.model import Estimate, Role, StoredModel

Seconds = Annotated[float, Field(le=366 * 86_400)]
"""A duration in settings, in seconds, at most 366 days. Timers of the operating system cannot count any number."""

_SECRET: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)$|^AWS_", re.IGNORECASE)


class Settings(BaseModel):
    """Base class for the settings of a component. Each field is a key in the config, with its type and a description.

    A plugin derives its settings models from this class:

        class LengthPenalty(Settings):
            limit: int = Field(default=512, ge=1, description="Tokens above which an answer loses reward.")

    An unknown key is an error. Values do not change after validation, and infinite numbers are refused. A field that
    `component(kind)` declares lets the reader of a config choose another component.

    The core also reads these optional attributes:

        default_learning_rate    of an algorithm: learning rate of an engine whose settings have none
        idle_steps(role)         of an algorithm: number of steps in which a role does not learn
        computes_top_logprobs    of a train engine: whether it computes the output `top_logprobs` in an update
        computes_sum_pi_squared  of a train engine: whether it computes the output `sum_pi_squared`
        replays_routed_experts   of a train engine: whether it trains each token of an MoE with the same experts that
                                 sampled it

    Example:
        >>> from pydantic import Field
        >>> from areal_core.config import LocalPath, Seconds, Secret, Settings
        >>> class JudgeSettings(Settings):
        ...     rubric: LocalPath = Field(description="File with the judge's instructions.")
        ...     timeout_s: Seconds = Field(60.0, gt=0, description="Timeout of one request in seconds.")
        ...     key: Secret | None = Field(None, description="API key of the judge, as env:NAME.")
        >>> settings = JudgeSettings(rubric="/data/rubric.txt", timeout_s=5, key="env:JUDGE_KEY")
        >>> settings.rubric, settings.timeout_s, settings.key
        (PosixPath('/data/rubric.txt'), 5.0, Secret(reference='env:JUDGE_KEY'))
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # settings in the signature of a function may be infinite
        validate_default=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """Return the roles that the component trains or queries, and the forward passes whose results it needs.

        Args:
            updates: optimizer updates per batch.
        """
        del updates
        return ()

    needs_group: ClassVar[bool] = False
    """Whether an advantage compares the answers to one prompt. A group size of 1 is then an error."""
    needs_top_logprobs: ClassVar[bool] = False
    """Whether a component of an algorithm reads `PolicyTerms.top_logprobs`. sampling.top_logprobs of 0, and a train
    engine that does not compute them, are then errors."""
    shows_images: ClassVar[bool] = False
    """Whether the requests of a workflow have images. An inference engine that accepts no images is then an error."""
    scores_answers: ClassVar[bool] = False
    """Whether the config's rewards score the answers of a workflow. A config without rewards is then an error."""

    needs_gpu: ClassVar[bool] = False
    """Whether an inference engine needs a GPU. `inference_engine: auto` then adds GPUs for it to the placement."""

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true` for a number, although Python counts it as 1."""
        if isinstance(value, bool) and takes_only_numbers(cls.model_fields[str(info.field_name)].annotation):
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _explain_errors(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """Raise `RejectedError` with hints about the model's keys, while areal reads a config.

        A script that creates a model has no validation context. It gets pydantic's own error.
        """
        try:
            return handler(value)
        except ValidationError as error:
            if info.context is None:
                raise
            raise RejectedError(from_validation(error, cls.model_fields)) from error

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Leave the example of the docstring out of the description: the readers of a schema write YAML."""
        described = handler(schema)
        model = handler.resolve_ref_schema(described)
        if "description" in model:
            model["description"] = model["description"].partition("\n\nExample:")[0]
        return described

    # `config` is an `areal_core.config.RunConfig`. RunConfig derives from this class, so the annotation here is `Any`.
    # A derived class can annotate it with `RunConfig`.
    def check(self, config: Any) -> Iterable[str]:
        """Return problems that involve other sections of the config, one line each; empty if there are none.

        areal calls this when every field is valid.

        Args:
            config: the `RunConfig`.
        """
        del config
        return ()

    def check_model(self, config: Any, model: StoredModel) -> Iterable[str]:
        """Return problems that involve the model, one line each; empty if there are none.

        areal calls this before it loads the model, if the model's folder is on this machine.

        Args:
            config: the `RunConfig`.
            model: the model of the run, or of the entry of `roles` that has these settings.
        """
        del config, model
        return ()

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why a row of the data cannot be used; empty if it can.

        Workflows, environments and example tokenizers may define this. Before a run, areal calls it for the first rows
        of each data set and for a sample of the others.

        Args:
            row: a row of the data set.
            tokenizer: the model's tokenizer; None if the model is not on this machine.

        Raises:
            SkippedRowError: a setting excludes the row, such as `overlong: skip`.
        """
        del row, tokenizer
        return ""

    def estimate(self, config: Any, models: Mapping[str, StoredModel]) -> Estimate:
        """Return what a run will need, such as memory. Train engines may define this.

        `areal run` calls it before each start and for `--dry-run`.

        Args:
            config: the `RunConfig`.
            models: models by role, if their folders are on this machine.

        Raises:
            RunError: the engine cannot train one of the models with these settings.
        """
        del config, models
        from areal_core.interfaces.model import Estimate

        return Estimate()

    def plan_memory(self, config: Any, trainer: Estimate, model: StoredModel) -> Estimate:
        """Return the memory that servers use on GPUs that they share, and why they do not fit.

        Inference engines may define this.

        Args:
            config: the `RunConfig`.
            trainer: result of the train engine's `estimate`.
            model: model that the servers load.
        """
        del config, trainer, model
        from areal_core.interfaces.model import Estimate

        return Estimate()

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """Return the rank of an inference engine. `inference_engine: auto` takes the engine with the highest rank.

        Args:
            gpus: number of GPUs of this machine; for a run on other machines, of those that `placement` names.

        Returns:
            1 for the embedded engine, more for a faster one; 0 if the engine cannot run here, for example because its
            program is not installed.
        """
        del gpus
        return 0

    def notes(self, config: Any) -> Iterable[str]:
        """Return notes about the settings and the rest of the config, one line each. They do not stop a run.

        Args:
            config: the `RunConfig`.
        """
        del config
        return ()


def takes_only_numbers(annotation: Any) -> bool:
    """Return whether an annotation allows numbers, and nothing else but None."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return takes_only_numbers(parts[0])
    if origin in (Union, UnionType):
        return all(part is type(None) or takes_only_numbers(part) for part in parts)
    return annotation in (int, float)


class NoSettings(Settings):
    """The settings of a component that has none. Its class is called without them.

    Example:
        >>> from areal_core.config import NoSettings, Selection
        >>> Selection("advantages", "mine/plain", NoSettings()).keywords()
        {}
    """


class Section(Settings):
    """Base class for a section of a run's config. The text below each key is its description in the documentation."""

    model_config = ConfigDict(use_attribute_docstrings=True)


@dataclass(frozen=True)
class Secret:
    """A password or key in an environment variable. A config names it as `env:NAME` and never contains its value.

    areal stores and shows `env:NAME`. The process that needs the value reads it with `get()` when it uses it.

    Attributes:
        reference: `env:NAME`.

    Raises:
        ValueError: `reference` is not of the form `env:NAME`, such as the secret itself.

    Example:
        >>> import os
        >>> from unittest.mock import patch
        >>> from areal_core.config import Secret
        >>> key = Secret("env:JUDGE_KEY")
        >>> with patch.dict(os.environ, {"JUDGE_KEY": "sk-123"}):
        ...     key.get()
        'sk-123'
    """

    reference: str

    def __post_init__(self) -> None:
        if not _SECRET.fullmatch(self.reference):
            raise ValueError(
                "a secret is named by an environment variable, written env:NAME; its value never stands in a config"
            )

    def get(self) -> str:
        """Return the value. Raise `ConfigError` if the variable is not set or empty."""
        name = self.reference.removeprefix("env:")
        value = os.environ.get(name)
        if not value:
            raise ConfigError(
                f"the environment variable {name}, which the config names as a secret, is not set",
                hints=(f"set it before the run: export {name}=...",),
            )
        return value

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            lambda value: value if isinstance(value, cls) else cls(value if isinstance(value, str) else ""),
            serialization=core_schema.plain_serializer_function_ser_schema(lambda secret: secret.reference),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{_SECRET.pattern}$"}


def public_environment(text: str = "") -> dict[str, str]:
    """Return this process's environment without secrets, for a program that runs other people's code.

    A variable is a secret if its name ends in `TOKEN`, `KEY`, `SECRET`, `PASSWORD` or `CREDENTIALS`, or begins with
    `AWS_`. `NO_PROXY` includes this machine.

    Args:
        text: a config as YAML. The result keeps the secrets that it names as `env:NAME`.

    Example:
        >>> import os
        >>> from unittest.mock import patch
        >>> from areal_core.config import public_environment
        >>> with patch.dict(os.environ, {"HF_TOKEN": "hf-123", "JUDGE_KEY": "sk-123"}):
        ...     environment = public_environment("rewards: [{type: rewards/judge, key: env:JUDGE_KEY}]")
        >>> "HF_TOKEN" in environment, environment["JUDGE_KEY"]
        (False, 'sk-123')
    """
    kept = {secret.removeprefix("env:") for secret in _SECRET.findall(text)}
    public = {name: value for name, value in os.environ.items() if name in kept or not _SECRET_NAME.search(name)}
    bypass_proxies(public)
    return public
