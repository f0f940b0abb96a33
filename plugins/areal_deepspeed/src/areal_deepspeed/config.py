"""Settings of the DeepSpeed engine. Imports neither torch nor DeepSpeed, so that a config is checked anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, ValidationError

from areal_core.config import LocalPath, Settings
from areal_deepspeed.document import AUTO, Document, read_document
from areal_deepspeed.refusals import no_images, refusals

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from areal_core.config import RunConfig
    from areal_core.interfaces import StoredModel

Share = Annotated[float, Field(ge=0, lt=1)]


class DeepSpeedConfig(Settings):
    """A DeepSpeed config as one has it, and what it leaves open."""

    config: LocalPath | dict[str, Any] = Field(
        description="a DeepSpeed JSON file, relative to the config, or its content. What it leaves out or has as "
        '"auto" is filled from the settings below and from the run; what contradicts them is refused'
    )
    learning_rate: float = Field(1e-5, gt=0, description="optimizer.params.lr")
    betas: tuple[Share, Share] = Field((0.9, 0.999), description="optimizer.params.betas")
    epsilon: float = Field(1e-8, gt=0, description="optimizer.params.eps")
    weight_decay: float = Field(
        0.0, ge=0, description="optimizer.params.weight_decay; decoupled; matrices only, never biases and norms"
    )
    max_gradient_norm: float | None = Field(
        1.0, gt=0, description="gradient_clipping: clip the global norm to this; null never clips"
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="updates over which the learning rate rises from 1 / warmup_steps of it; in a `scheduler` of the "
        "JSON warmup_num_steps",
    )
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="after the warm-up; a `scheduler` of the JSON takes its place"
    )
    minimum_learning_rate_ratio: float = Field(
        0.0, ge=0, le=1, description="where linear and cosine end, as a share of learning_rate"
    )
    max_tokens_per_microbatch: int = Field(
        16384,
        ge=1,
        description="tokens that a rank has in the model at once, which DeepSpeed's train_micro_batch_size_per_gpu "
        "says in sequences; a longer sequence goes through alone",
    )
    activation_checkpointing: bool = Field(
        False, description="keep of each layer its input alone, and compute it again in the backward pass"
    )
    logprob_chunk_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens whose logits exist at once, more where the vocabulary is tiny; null: 1,024 on a CPU, by "
        "its memory on a GPU",
    )

    @property
    def chosen(self) -> set[str]:
        """Settings that are not at their defaults. Which ones somebody wrote is not known: a run writes all of them."""
        fields = type(self).model_fields
        return {name for name, field in fields.items() if getattr(self, name) != field.get_default()}

    def impossible(self, pairs: Mapping[str, tuple[object, str, object]]) -> Iterator[str]:
        """Values in the JSON that our settings of the same meaning would not take.

        Args:
            pairs: as `Document.pairs` has them.
        """
        for key, (theirs, name, _) in pairs.items():
            if theirs == AUTO or (name == "max_gradient_norm" and theirs == 0):
                continue
            try:
                type(self).model_validate({"config": {}, name: theirs}, strict=False)
            except ValidationError as error:
                yield f"the DeepSpeed config has {key}: {theirs!r:.60}: {error.errors()[0]['msg']}"

    def document(self) -> Document:
        """The DeepSpeed config with these settings beside it.

        Raises:
            ValueError: the file cannot be read, or is no JSON object.
        """
        return Document(read_document(self.config), self)

    def check(self, config: RunConfig) -> Iterable[str]:
        """Whatever in the JSON contradicts the run or these settings, each with what to do about it."""
        try:
            document = self.document()
        except ValueError as error:
            return [str(error)]
        problems = list(refusals(document, config.model.dtype))
        if config.longest_sequence > self.max_tokens_per_microbatch:
            problems.append(
                f"sequences may have {config.longest_sequence} tokens (sampling.max_new_tokens behind a prompt, or "
                f"workflow.max_tokens), and max_tokens_per_microbatch is {self.max_tokens_per_microbatch}: raise it"
            )
        return problems

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """A a VLM is trained by another engine, and routers must be able to choose."""
        del config
        from areal_core.servers.experts import choice_problems

        yield from choice_problems(model)
        if model.description.get("vision_config") is not None:
            yield no_images(str(model.description.get("model_type")))
