"""The section `adapter` of a training engine. Imports no torch, so that a config is checked anywhere."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, model_validator

from areal_core.config import LocalPath, Settings
from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from areal_core.config import RunConfig

ALL_LINEAR: Final = "all-linear"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_MATRIX = re.compile(r".*?\.\d+\.(?:.*\.)?([^.]+)\.weight")
"""A tensor of a layer, and the last part of its module's name."""
_EXPERTS = re.compile(r"\.experts\.")
_OF_MIXTURE = re.compile(r"\.(?:mlp|block_sparse_moe|feed_forward)\.")
"""The part of a layer that has experts, and what stands beside them."""
_OF_VISION = re.compile(r"(?:.*\.)?(?:visual|vision_tower|vision_model)\.")
"""What sees pictures, which has no adapter."""
_OF_FILES = ("rank", "alpha", "modules", "initialization")
"""Settings that a saved adapter has of its own."""
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "lora_dropout": (0, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "exclude_modules": (None,),
    "layers_to_transform": (None,),
    "target_parameters": (None,),
}
"""What PEFT's config of a plain adapter says, as far as it says it."""


class LoraSettings(Settings):
    """A low-rank adapter, LoRA (arXiv 2106.09685): y = W x + alpha / rank x B A x, of which A and B alone learn."""

    rank: int = Field(16, ge=1, description="rows of A and columns of B")
    alpha: float = Field(32.0, gt=0, description="what B A is multiplied by is alpha / rank")
    modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear",
        description="which matrices have an adapter: all of the layers, or those of these names, such as "
        "[q_proj, v_proj]; never embeddings and head",
    )
    initialization: Literal["kaiming", "gaussian"] = Field(
        "kaiming", description="of A, from a fixed seed; B is 0, so that the model begins as its base"
    )
    from_folder: LocalPath | None = Field(
        None,
        description="begin from an adapter that was saved in PEFT's format, which says rank, alpha and modules; "
        "relative to the config",
    )

    publish: Literal["merged", "alone"] = Field(
        "merged",
        description="what inference engines get: the model's weights with the adapter merged into them, which all of "
        "them take, or the adapter alone, which servers must take (adapter_rank)",
    )

    @model_validator(mode="after")
    def _says_it_once(self) -> LoraSettings:
        told = {name: field.default for name, field in type(self).model_fields.items() if name in _OF_FILES}
        said = sorted(name for name, default in told.items() if getattr(self, name) != default)
        if self.from_folder is not None and said:
            raise ValueError(f"from_folder says what the adapter is: leave out {', '.join(said)}")
        return self

    def problems(self, config: RunConfig) -> Iterator[str]:
        """What is known to be wrong before a model is loaded."""
        if importlib.util.find_spec("peft") is None:
            yield "adapter needs the library peft, which is not installed: pip install 'areal-fsdp[lora]'"
        if self.from_folder is not None and self.from_folder.parent == Path(config.model.path or "").resolve():
            yield (
                f"adapter.from_folder {self.from_folder} lies in model.path, an export with which it is merged "
                "already: set model.path to the model that it was trained on"
            )
        try:
            rank = self.resolved().rank
        except RunError as error:
            yield "; ".join([error.message, *error.hints])
            return
        if self.publish == "merged" or config.inference_engine is None:
            return
        if (room := getattr(config.inference_engine.settings, "adapter_rank", None) or 0) < rank:
            takes = f"adapter.publish is alone, its rank {rank}, and {config.inference_engine.reference} takes"
            if "adapter_rank" in config.inference_engine.keywords():
                yield (
                    f"{takes} adapters of rank {room} at most: set inference_engine.adapter_rank={rank}, or publish: "
                    "merged"
                )
            else:
                yield f"{takes} no adapters: set adapter.publish to merged, or take servers of vllm or sglang"
        if config.publication.transport == "broadcast":
            yield "adapter.publish is alone, and adapters travel in files: set publication.transport to memory"

    def resolved(self) -> LoraSettings:
        """With rank, alpha and modules of the folder that it begins from, where there is one.

        Raises:
            RunError: the folder has no adapter of this kind.
        """
        if self.from_folder is None:
            return self
        path = self.from_folder / ADAPTER_CONFIG
        try:
            if path.exists() and not path.is_file():  # a pipe would be waited for
                raise OSError("it is no file")
            known = json.loads(path.read_text(encoding="utf-8"))
            size = {"rank": known["r"], "alpha": known["lora_alpha"]}
            named = {"modules": found} if isinstance(found := known.get("target_modules"), list) else {}
            read = type(self).model_validate({**size, **named})
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise RunError(
                f"adapter.from_folder: {path} cannot be read: {told}",
                hints=[f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as PEFT and exports write it"],
            ) from error
        odd = [f"{key}={known[key]}" for key, plain in _PLAIN.items() if key in known and known[key] not in plain]
        if not isinstance(modules := known.get("target_modules"), list):
            odd.append(f"target_modules={modules}")
        if odd:
            raise RunError(
                f"adapter.from_folder: the adapter in {self.from_folder} is not plain LoRA: {', '.join(odd)}",
                hints=["save it again with those at PEFT's defaults and target_modules as a list, or merge it first"],
            )
        return self.model_copy(update={"rank": read.rank, "alpha": read.alpha, "modules": modules})

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Of the names of tensors of a model, those of matrices that have an adapter.

        Raises:
            RunError: a name of `modules` is none of the layers' matrices.
        """
        matrices = {name: found[1] for name in names if (found := _MATRIX.fullmatch(name))}
        wanted = self.modules
        if wanted == ALL_LINEAR:
            return list(matrices)
        if strangers := [module for module in wanted if not any(_is_of(name, module) for name in matrices)]:
            raise RunError(
                f"adapter.modules: no matrix in the model's layers is called {', '.join(sorted(strangers))}",
                hints=[f"its layers have {', '.join(sorted(set(matrices.values())))}; or write modules: all-linear"],
            )
        return [name for name in matrices if any(_is_of(name, module) for module in wanted)]

    def refuse_experts(self, names: Collection[str]) -> None:
        """Experts of a mixture have no adapters, and neither have matrices beside them.

        Args:
            names: of a model's tensors in its files.

        Raises:
            RunError: the settings mean some of these.
        """
        layers = [found for name in names if (found := _MATRIX.fullmatch(name))]
        if not any(map(_EXPERTS.search, names)):
            return
        attention = sorted({found[1] for found in layers if "attn" in found[0] and found[1].endswith("proj")})
        hints = [f"name matrices of attention: modules: [{', '.join(attention)}]"]
        if self.modules == ALL_LINEAR:
            raise RunError(
                "adapter.modules: all-linear would leave out the experts, and the model is a mixture of them",
                hints=hints,
            )
        of_experts = {found[1] for found in layers if _OF_MIXTURE.search(found[0])}
        if odd := sorted(of_experts & {module.rpartition(".")[2] for module in self.modules}):
            raise RunError(
                f"adapter.modules: {', '.join(odd)} are matrices of the model's experts, or beside them, and experts "
                "have no adapters",
                hints=hints,
            )

    def parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Elements of A and B together.

        Args:
            shapes: of the model's tensors, by name.

        Raises:
            RunError: see `resolved` and `chosen`.
        """
        known = self.resolved()
        names = [name for name in shapes if not _OF_VISION.match(name)]
        known.refuse_experts(names)
        chosen = known.chosen(name for name in names if len(shapes[name]) == 2)
        return sum(known.rank * sum(shapes[name]) for name in chosen)


def _is_of(name: str, module: str) -> bool:
    """Whether a tensor is the weight of a module: of its whole name, or of the end of it behind a dot."""
    return name == f"{module}.weight" or name.endswith(f".{module}.weight")
