"""The base of every settings model, the core's and the plugins', and the type of a secret."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Self

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
"""A span of time in settings: what waits for years waits for ever, and clocks cannot count everything."""

_NUMBERS: Final = (int, float, int | None, float | None)

_SECRET: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")
_SECRET_NAME: Final = re.compile(r"(TOKEN|KEY|SECRET|PASSWORD|CREDENTIALS)$|^AWS_", re.IGNORECASE)


class Settings(BaseModel):
    """What can be set for one part: a field for each key, each with a default or required, each described.

    An unknown key is an error, values do not change after validation, and infinities are refused. A plugin derives
    its `config` models from this class. A field declared with `component(kind)` lets the reader choose a part there.

    Where they are there, the core also reads of an algorithm's settings `default_learning_rate`, for engines that are
    told none, and `idle_steps(role)`, the steps in which a role does not learn; of a train engine's
    `replays_routed_experts`, that it trains tokens of an MoE through the experts that they were sampled through.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # of a function's own settings, which may be infinite
        validate_default=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    def needs(self, updates: int) -> Iterable[Role | ForwardPass]:
        """The roles that the component trains or asks, and the columns that models must have computed for it.

        Args:
            updates: optimizer updates that follow on a batch.
        """
        del updates
        return ()

    needs_group: ClassVar[bool] = False
    """For settings of an advantage: it compares the answers to one prompt, so that a group of one is a mistake."""
    shows_images: ClassVar[bool] = False
    """For settings of a workflow: its requests have images, so that an engine which takes none is a mistake."""
    scores_answers: ClassVar[bool] = False
    """For settings of a workflow: the config's rewards score its answers, so that to have none is a mistake."""

    needs_gpu: ClassVar[bool] = False
    """For settings of an inference engine: `inference_engine: auto` names GPUs for it in placement."""

    @field_validator("*", mode="before")
    @classmethod
    def _count(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse true where a number is asked for: that it counts as 1 is Python's affair."""
        if isinstance(value, bool) and cls.model_fields[str(info.field_name)].annotation in _NUMBERS:
            raise ValueError(f"must be a number, not {str(value).lower()}")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, value: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        """While a config is read, tell mistakes with the keys that this model has; a script gets pydantic's own."""
        try:
            return handler(value)
        except ValidationError as error:
            if info.context is None:
                raise
            raise RejectedError(from_validation(error, cls.model_fields)) from error

    # `config` is the `areal_core.config.RunConfig`. That is made of settings: what is derived from these can name it.
    def check(self, config: Any) -> Iterable[str]:
        """Mistakes that show only beside the rest of the config, one line each; asked once every field is valid."""
        del config
        return ()

    def check_model(self, config: Any, model: StoredModel) -> Iterable[str]:
        """Mistakes that show beside the model, one line each; asked before it is loaded, where its folder is there.

        Args:
            config: of the run.
            model: the run's, or, in an entry of `roles`, that one's.
        """
        del config, model
        return ()

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why a row of the data cannot be used; empty if it can.

        For settings of workflows, environments and example tokenizers. Before a run it is called for the first rows of
        each data set and for rows from all over it.

        Args:
            row: a row of the data set.
            tokenizer: the model's tokenizer; None if the model is not on this machine.

        Raises:
            SkippedRowError: a setting excludes the row, such as `overlong: skip`.
        """
        del row, tokenizer
        return ""

    def estimate(self, config: Any, models: Mapping[str, StoredModel]) -> Estimate:
        """For settings of an engine: what a run will take, such as memory; asked by `--dry-run` and before each start.

        Args:
            config: of the run.
            models: those of its roles whose folders are there.

        Raises:
            RunError: the engine cannot train such a model with these settings, and why.
        """
        del config, models
        from areal_core.interfaces.model import Estimate

        return Estimate()

    def plan_memory(self, config: Any, trainer: Estimate, model: StoredModel) -> Estimate:
        """For settings of an inference engine: what servers take of GPUs that they share, and why they do not fit.

        Args:
            config: of the run.
            trainer: what the train engine's `estimate` returned.
            model: which the servers hold.
        """
        del config, trainer, model
        from areal_core.interfaces.model import Estimate

        return Estimate()

    @classmethod
    def automatic_rank(cls, gpus: int) -> int:
        """Return an inference engine's rank for `inference_engine: auto`, which takes the highest.

        Args:
            gpus: of this machine.

        Returns:
            1 for the embedded engine, more for a faster one; 0 if it cannot run here, because its program is not
            installed for example.
        """
        del gpus
        return 0

    def notes(self, config: Any) -> Iterable[str]:
        """What is no mistake and yet worth a look beside the rest of the config, one line each; a run goes ahead."""
        del config
        return ()


class NoSettings(Settings):
    """The settings of a component that has none. Its class is called without them."""


class Section(Settings):
    """A section of a run's config. Every key is described by the text below it, which the documentation shows."""

    model_config = ConfigDict(use_attribute_docstrings=True)


@dataclass(frozen=True)
class Secret:
    """A password or key, named and never written down: only `env:NAME` is accepted, stored and shown.

    `get()` reads the environment variable at the moment of use, in the process that needs it.
    """

    reference: str

    def __post_init__(self) -> None:
        if not _SECRET.fullmatch(self.reference):
            raise ValueError(
                "a secret is named by an environment variable, written env:NAME; its value never stands in a config"
            )

    def get(self) -> str:
        """The value; `ConfigError` if the variable is not set."""
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
    """Return this process's environment for a program that runs code of others.

    Variables that are named like secrets are left out, and no proxy applies to this machine.

    Args:
        text: a config; secrets that it names, as `env:NAME`, are kept.
    """
    named = {secret.removeprefix("env:") for secret in _SECRET.findall(text)}
    public = {name: value for name, value in os.environ.items() if name in named or not _SECRET_NAME.search(name)}
    bypass_proxies(public)
    return public
