"""Settings of the DeepSpeed engine. This module imports neither torch nor DeepSpeed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from areal_core.config import LocalPath  # noqa: TC001 - pydantic reads annotations
from areal_deepspeed.document import Document, read_document
from areal_deepspeed.refusals import no_images, refusals
from areal_fsdp.models.schedule import LearningSettings

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel


class DeepSpeedConfig(LearningSettings):
    """Settings of the DeepSpeed engine: an existing DeepSpeed config, and settings for what it leaves open."""

    config: LocalPath | dict[str, Any] = Field(
        description='DeepSpeed JSON file, relative to the config, or its content. Missing and "auto" values are '
        "filled in from the settings here and from the run. Values that contradict them are refused."
    )
    activation_checkpointing: bool = Field(
        False, description="Store only each layer's input and recompute the layer in the backward pass."
    )

    @property
    def chosen(self) -> set[str]:
        """Settings that differ from their defaults. Which ones the user wrote is unknown, because runs write all."""
        fields = type(self).model_fields
        return {name for name, field in fields.items() if getattr(self, name) != field.get_default()}

    def document(self) -> Document:
        """Return the DeepSpeed config together with these settings.

        Raises:
            ValueError: the file cannot be read, or a section or value has the wrong type.
        """
        return Document(read_document(self.config), self)

    def problems(self, dtype: str) -> list[str]:
        """Return all contradictions between the JSON and a model of this dtype or these settings, with their fixes."""
        try:
            return list(refusals(self.document(), dtype))
        except ValueError as error:
            return [str(error)]

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check for contradictions before the run starts. DeepSpeed itself refuses other errors when it is set up."""
        yield from self.problems(config.model.dtype)
        yield from super().check(config)

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Refuse vision-language models, which this engine does not support."""
        yield from super().check_model(config, model)
        if model.description.get("vision_config") is not None:
            yield no_images(str(model.description.get("model_type")))
