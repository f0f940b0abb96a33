"""The section `adapter` of a training engine. Imports no torch, so that a config is checked anywhere."""

from __future__ import annotations

import filecmp
import importlib.util
import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from areal_core.config import LocalPath, Settings
from areal_core.errors import RunError
from areal_core.plugins import install_command
from areal_fsdp.lora.stored import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_shapes, refuse_misfit

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from areal_core.config import RunConfig
    from areal_core.engines import StoredModel

ALL_LINEAR: Final = "all-linear"
DROPOUT: Final = "lora_dropout"
"""PEFT's name of the dropout probability of an adapter's inputs."""
_MATRIX = re.compile(r".*?\.\d+\.(?:.*\.)?([^.]+)\.weight")
"""Weight of a module in a layer; group 1 is the last part of the module's name."""
_EXPERTS = re.compile(r"\.experts\.")
_OF_MOE = re.compile(r"\.(?:mlp|block_sparse_moe|feed_forward)\.")
"""Modules that contain a layer's experts, routers and shared experts."""
_OF_VISION = re.compile(r"(?:.*\.)?(?:visual|vision_tower|vision_model)\.")
"""Tensors of a vision tower, which gets no adapter."""
_LARGEST_SCALE = 1e6
"""Upper bound of alpha / rank: far above every useful value, and far below float32's range."""
_OF_FILES = ("rank", "alpha", "modules", "initialization")
"""Settings that a saved adapter determines."""
_READ_OR_UNUSED: Final = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision", "task_type"),
        *("r", "lora_alpha", "target_modules"),
        *("ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
"""Fields of PEFT's config that may have any value: `resolved` reads them, or they matter only with another field."""
_PLAIN: Final[dict[str, tuple[Any, ...]]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal"),
}
"""Accepted values of some fields. Other fields must be null, false, 0 or empty, or have PEFT's default.

The other initializations change the base model before training (PiSSA, OLoRA, CorDA, LoftQ, LoRA-GA), or they are not
LoRA with one rank for all matrices (EVA, MiCA).
"""
_HEADS: Final = frozenset({"classifier", "score"})
"""Heads that PEFT saves with every adapter of a classifier. Critics load them."""


class LoraSettings(Settings):
    """A low-rank adapter, LoRA (arXiv 2106.09685): y = W x + alpha / rank x B A x. Only A and B are trained."""

    rank: int = Field(16, ge=1, description="Rank of the adapter: rows of A and columns of B.")
    alpha: float = Field(32.0, gt=0, description="LoRA scaling: the update B A is multiplied by alpha / rank.")
    modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = Field(
        "all-linear",
        description="Matrices that get an adapter. `all-linear`: every linear layer in the decoder layers. A list: "
        "the layers with these names, such as [q_proj, v_proj]. Embeddings, the head, and an MoE's experts and "
        "routers get none; a warning names the parts of the layers that stay frozen.",
    )
    initialization: Literal["kaiming", "gaussian"] = Field(
        "kaiming",
        description="Initialization of A, from `seed`. B is initialized to 0, so that the model begins as its base.",
    )
    seed: int = Field(0, ge=0, lt=2**63, description="Random seed of the initialization of A.")
    from_folder: LocalPath | None = Field(
        None,
        description="Folder with an adapter in PEFT's format to start from, relative to the config. It determines "
        "rank, alpha and modules: leave these and initialization out, or set them to null. null: a new adapter.",
    )

    sync: Literal["merged", "alone"] = Field(
        "merged",
        description="What a weight sync sends. `merged`: the model's weights with the adapter merged into them, "
        "which every inference engine accepts. `alone`: only the adapter, which servers must support (adapter_rank).",
    )

    @model_validator(mode="before")
    @classmethod
    def _null_is_the_folders(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("from_folder") is None:
            return value
        return {key: entry for key, entry in value.items() if entry is not None or key not in _OF_FILES}

    @field_validator("modules", mode="before")
    @classmethod
    def _names_matrices(cls, value: Any) -> Any:
        if value != ALL_LINEAR and not (
            isinstance(value, list | tuple) and value and all(isinstance(n, str) for n in value)
        ):
            raise ValueError("must be all-linear, or a list of names such as [q_proj, v_proj]")
        return value

    @model_validator(mode="after")
    def _refuse_settings_of_the_folder(self) -> LoraSettings:
        defaults = {name: field.default for name, field in type(self).model_fields.items() if name in _OF_FILES}
        changed = sorted(name for name, default in defaults.items() if getattr(self, name) != default)
        if self.from_folder is not None and changed:
            raise ValueError(
                f"from_folder determines {', '.join(_OF_FILES)}: leave out {', '.join(changed)}, or set them to null"
            )
        if self.alpha / self.rank > _LARGEST_SCALE:
            raise ValueError(f"alpha / rank is {self.alpha / self.rank:.3g}; the maximum is {_LARGEST_SCALE:,.0f}")
        return self

    def check_model(self, config: RunConfig, model: StoredModel) -> Iterable[str]:
        """Yield a problem if the model is an export that has this adapter, or a copy of it, merged already."""
        del config
        if self.from_folder is None:
            return
        chosen, merged = (folder / ADAPTER_WEIGHTS for folder in (self.from_folder, model.folder / "adapter"))
        if chosen.is_file() and merged.is_file() and filecmp.cmp(chosen, merged, shallow=False):
            yield (
                f"adapter.from_folder {self.from_folder} is the adapter of the export {model.folder}, which has it "
                "merged already: set model.path to the model that the adapter was trained on"
            )

    def problems(self, config: RunConfig) -> Iterator[str]:
        """Yield the problems that can be found before a model is loaded."""
        if importlib.util.find_spec("peft") is None:
            yield f"adapter needs the library peft, which is not installed: {install_command('fsdp', extra='lora')}"
        try:
            rank = self.resolved().rank
            if self.from_folder is not None:
                read_shapes(self.from_folder)
        except RunError as error:
            yield "; ".join([error.message, *error.hints])
            return
        if self.sync == "merged" or config.inference_engine is None:
            return
        engine = config.inference_engine
        largest_rank = getattr(engine.settings, "adapter_rank", None) or 0
        if largest_rank < rank:
            start = f"adapter.sync is alone and the adapter's rank is {rank}, but {engine.reference} accepts"
            if "adapter_rank" in engine.keywords():
                yield (
                    f"{start} at most rank {largest_rank}: set inference_engine.adapter_rank={rank}, or adapter.sync "
                    "to merged"
                )
            else:
                yield f"{start} no adapters: set adapter.sync to merged, or use vllm or sglang"
        if config.weight_sync.transport.target not in {"core/memory", "core/disk"}:
            yield "adapter.sync is alone, and adapters are sent as files: set weight_sync.transport to memory"

    def resolved(self) -> LoraSettings:
        """Return these settings with rank, alpha and modules of the adapter in `from_folder`, if there is one.

        Raises:
            RunError: the folder has no plain LoRA adapter.
        """
        if self.from_folder is None:
            return self
        path = self.from_folder / ADAPTER_CONFIG
        try:
            if path.exists() and not path.is_file():  # reading a pipe would block
                raise OSError("it is not a file")
            known = json.loads(path.read_text(encoding="utf-8"))
            modules = known.get("target_modules")
            fields = {"rank": known["r"], "alpha": known["lora_alpha"]}
            if isinstance(modules, list):
                fields["modules"] = modules
            saved = type(self).model_validate(fields)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
            raise RunError(
                f"adapter.from_folder: {path} cannot be read: {reason}",
                hints=[f"name a folder with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}, as PEFT and exports write it"],
            ) from error
        not_plain = [f"{key}={value}" for key, value in known.items() if not _is_plain(key, value, known)]
        if not isinstance(modules, list):
            not_plain.append(f"target_modules={modules}")
        if not_plain:
            raise RunError(
                f"adapter.from_folder: the adapter in {self.from_folder} is not plain LoRA: {', '.join(not_plain)}",
                hints=_remedies(known, not_plain),
            )
        return self.model_copy(update={"rank": saved.rank, "alpha": saved.alpha, "modules": modules})

    def chosen(self, names: Iterable[str]) -> list[str]:
        """Return the names of the matrices that get an adapter; experts of an MoE get none.

        Args:
            names: names of a model's tensors.

        Raises:
            RunError: a name in `modules` matches no matrix of the layers.
        """
        outside_experts = (name for name in names if not _EXPERTS.search(name))
        matrices = {name: match[1] for name in outside_experts if (match := _MATRIX.fullmatch(name))}
        if self.modules == ALL_LINEAR:
            return list(matrices)
        if unknown := [module for module in self.modules if not any(_is_of(name, module) for name in matrices)]:
            raise RunError(
                f"adapter.modules: no matrix in the model's layers is called {', '.join(sorted(unknown))}",
                hints=[f"its layers have {', '.join(sorted(set(matrices.values())))}; or set modules: all-linear"],
            )
        return [name for name in matrices if any(_is_of(name, module) for module in self.modules)]

    def refuse_experts(self, names: Collection[str]) -> None:
        """Refuse names in `modules` that may mean experts: experts get no adapters, so only the rest would learn.

        Args:
            names: names of a model's tensors in its files.

        Raises:
            RunError: `modules` has the name of a matrix of the experts or of the same block.
        """
        if self.modules == ALL_LINEAR or self.from_folder is not None or not any(map(_EXPERTS.search, names)):
            return
        layers = [match for name in names if (match := _MATRIX.fullmatch(name))]
        attention = sorted({match[1] for match in layers if "attn" in match[0] and match[1].endswith("proj")})
        of_experts = {match[1] for match in layers if _OF_MOE.search(match[0])}
        if refused := sorted(of_experts & {module.rpartition(".")[2] for module in self.modules}):
            raise RunError(
                f"adapter.modules: {', '.join(refused)} are matrices of the model's experts or of the same block, and "
                "experts have no adapters",
                hints=[f"name matrices of attention: modules: [{', '.join(attention)}]; or set modules: all-linear"],
            )

    def parameters(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Return the number of elements of all A and B.

        Args:
            shapes: shapes of the model's tensors, by name.

        Raises:
            RunError: see `resolved`, `chosen` and `refuse_rank`; or the folder has the adapter of another model.
        """
        known = self.resolved()
        names = [name for name in shapes if not _OF_VISION.match(name)]
        known.refuse_experts(names)
        chosen = {name: shapes[name] for name in known.chosen(name for name in names if len(shapes[name]) == 2)}
        known.refuse_rank(chosen)
        if known.from_folder is not None:
            refuse_misfit(known.from_folder, known.rank, chosen)
        return sum(known.rank * sum(shape) for shape in chosen.values())

    def refuse_rank(self, matrices: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse a rank that is larger than every matrix allows. Some matrices may be narrower than the rank.

        Args:
            matrices: shapes of the matrices with an adapter, by name.

        Raises:
            RunError: the rank is larger than the smaller side of every matrix.
        """
        name, shape = max(matrices.items(), key=lambda named: min(named[1]))
        if self.rank > min(shape):
            raise RunError(
                f"adapter.rank {self.rank} is larger than any matrix allows: '{name}' has shape {tuple(shape)}",
                hints=[f"use an adapter of rank {min(shape)} or less; 8 to 64 are usual"],
            )


def _is_of(name: str, module: str) -> bool:
    """Return True if a tensor is the weight of a module, given by its whole name or by the last parts of it."""
    return name == f"{module}.weight" or name.endswith(f".{module}.weight")


def _is_plain(key: str, value: Any, known: Mapping[str, Any]) -> bool:
    """Return True if the value of a field of PEFT's config `known` leaves y = W x + alpha / rank x B A x unchanged."""
    if key in _READ_OR_UNUSED:
        return True
    if key == DROPOUT and isinstance(value, float):  # dropout does not change the weights; this engine applies none
        return 0 <= value < 1
    if key in _PLAIN:
        return any(value == plain and type(value) is type(plain) for plain in _PLAIN[key])
    if key == "modules_to_save" and known.get("task_type") == "SEQ_CLS" and isinstance(value, list):
        return _HEADS.issuperset(value)
    return not value or value == _default(key)


def _default(key: str) -> Any:
    """Return the installed PEFT's default of a field; None if it has no such field."""
    try:
        from peft import LoraConfig
    except ImportError:
        return None
    return getattr(LoraConfig(), key, None)


def _remedies(known: Mapping[str, Any], not_plain: Iterable[str]) -> list[str]:
    """Return hints for an adapter that is not plain LoRA."""
    merge = (
        "merge it into its base model with PEFT (merge_and_unload), set model.path to the result, and train a new "
        "adapter"
    )
    if any(field.startswith("init_lora_weights=") for field in not_plain):
        return [
            f"an adapter initialized with {known['init_lora_weights']} may belong to a changed base model: convert it "
            "with PEFT, save_pretrained(..., path_initial_model_for_weight_conversion=...), which writes a plain one",
            f"or {merge}",
        ]
    return [f"{merge}; or train it again with PEFT's defaults for these fields and target_modules as a list"]
