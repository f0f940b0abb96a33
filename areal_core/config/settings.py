"""The base of every settings model, the core's and the plugins', and the type of a secret."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import PydanticCustomError, core_schema

from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config.run_config import RunConfig


class Settings(BaseModel):
    """What can be set for one part: a field for each key, each with a default or required, each described.

    An unknown key is an error, values do not change after validation, and infinities are refused. A plugin derives
    its `config` models from this class. A field declared with `component(kind)` lets the reader choose a part there.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        protected_namespaces=(),
    )

    needs_group: ClassVar[bool] = False
    """For settings of an advantage: it compares the answers to one prompt, so that a group of one is a mistake."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Mistakes that show only beside the rest of the config, one line each; asked once every field is valid."""
        del config
        return ()


class Secret:
    """A password or key, named and never written down: only `env:NAME` is accepted, stored and shown.

    `get()` reads the environment variable at the moment of use, in the process that needs it.
    """

    _FORM: Final = re.compile(r"env:[A-Za-z_][A-Za-z0-9_]*")

    def __init__(self, reference: str) -> None:
        if not self._FORM.fullmatch(reference):
            raise ValueError(
                "a secret is named by an environment variable, written env:NAME; its value never stands in a config"
            )
        self.reference = reference

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

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other.reference == self.reference

    def __hash__(self) -> int:
        return hash(self.reference)

    def __repr__(self) -> str:
        return f"Secret({self.reference!r})"

    __str__ = __repr__

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            cls._validate,
            serialization=core_schema.plain_serializer_function_ser_schema(lambda secret: secret.reference),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: core_schema.CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"type": "string", "pattern": f"^{cls._FORM.pattern}$"}

    @classmethod
    def _validate(cls, value: object) -> Secret:
        if isinstance(value, Secret):
            return value
        try:
            return cls(value if isinstance(value, str) else "")
        except ValueError as error:
            raise PydanticCustomError("secret", "{cause}", {"cause": str(error)}) from None
