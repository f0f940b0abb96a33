"""A LoRA adapter in a Hugging Face model: PEFT's layers around its matrices, and what goes in and out of them.

PEFT renames `q_proj.weight` to `q_proj.base_layer.weight` and puts `q_proj.lora_A.default.weight` beside it. Towards
the outside names are those of the model's files, and those of PEFT's files.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from areal_core.errors import RunError
from areal_fsdp.lora.settings import ALL_LINEAR
from areal_fsdp.lora.stored import ADAPTER_WEIGHTS, read_shapes
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from areal_fsdp.lora.settings import LoraSettings

_NAME = "default"
"""PEFT's name of the one adapter that there is."""
_BASE, _OWN = ".base_layer.", f".{_NAME}."
_PREFIX = "base_model.model."
"""Of all names in PEFT's files."""
_SEED = 0
"""Of A: all ranks draw the same."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model's adapter; made by `install`.

    Attributes:
        model: with PEFT's layers.
        layers: those, by the name of their matrix in the model's files.
        config: PEFT's.
        head: name of a head that learns beside the adapter, empty where none does.
        begins_elsewhere: whether what it began as is not its base alone.
        is_synced_alone: whether inference engines get nothing but A and B.
        is_on: whether the model is asked with the adapter, or as its base alone.
    """

    model: PreTrainedModel
    layers: dict[str, Any]
    config: LoraConfig
    head: str
    begins_elsewhere: bool
    is_synced_alone: bool = False
    is_on: bool = True

    def without(self) -> Adapter:
        """For whoever asks the same model as its base alone."""
        return replace(self, is_on=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model as it is to be asked: with the adapter, or, for a while and without gradients, without it.

        PEFT's own switch would also say that A and B need no gradients, which sharding asks once and for all.
        """
        self._switch(off=not self.is_on)
        try:
            yield
        finally:
            self._switch(off=False)

    def _switch(self, *, off: bool) -> None:
        for layer in self.layers.values():
            layer._disable_adapters = off

    def places(self) -> dict[str, str]:
        """The names that parameters without memory have in the model, by those that they have in its files."""
        return {name.replace(_BASE, "."): name for name, value in self.model.named_parameters() if value.is_meta}

    def own(self) -> dict[str, torch.nn.Parameter]:
        """A, B and what else learns, by name as in PEFT's files without their prefix."""
        found = self.model.named_parameters()
        return {name.replace(_OWN, "."): value for name, value in found if _OWN in name or self.is_heads(name)}

    def is_heads(self, name: str) -> bool:
        """Whether a parameter is of the head that learns beside the adapter."""
        return bool(self.head) and name.startswith(f"{self.head}.")

    def merged(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name and tensor of each parameter of the model with its adapter merged, one at a time, tied ones once.

        W + alpha / rank x B A is computed in float32 and rounded to W's dtype.

        Args:
            whole: makes a parameter of all ranks one tensor; may be collective.
        """
        for name, parameter in self.model.named_parameters():
            if _OWN in name:
                continue
            plain = name.replace(_BASE, ".")
            tensor = whole(parameter)
            layer = self.layers.get(plain)
            if layer is not None and self.is_on:
                tensor = _sum(tensor, whole(layer.lora_A[_NAME].weight), whole(layer.lora_B[_NAME].weight), layer)
            yield plain, tensor

    def alone(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Name, as in PEFT's files, and tensor of each A and B; B is multiplied by alpha / rank, so that alpha is rank.

        Args:
            whole: as in `merged`.
        """
        for name, layer in self.layers.items():
            place = _PREFIX + name.removesuffix("weight")
            yield f"{place}lora_A.weight", whole(layer.lora_A[_NAME].weight)
            yield f"{place}lora_B.weight", whole(layer.lora_B[_NAME].weight) * layer.scaling[_NAME]

    def export(
        self, folder: Path, learned: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Write the adapter alone, in PEFT's format; collective.

        Args:
            folder: its place.
            learned: by the names of `own`: the parameters or their masters; may be empty, where nothing learns.
            whole: as in `merged`.

        Raises:
            RunError: it cannot be written.
        """
        rank, _ = rank_and_ranks()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in (learned or self.own()).items():
            tensor = whole(parameter)
            if rank == 0:
                tensors[_PREFIX + name] = tensor.to("cpu", copy=True).contiguous()
        failure: Exception | None = None
        if rank == 0:
            try:
                self.config.save_pretrained(str(folder))
                save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
                failure = error
        fail_together(failure, f"exporting the adapter to '{folder}'")


def _sum(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: Any) -> torch.Tensor:
    """[out, in] or, of GPT-2's layers, [in, out], as W; A is [rank, in], B [out, rank]."""
    left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
    scale = layer.scaling[_NAME]
    return torch.addmm(weight.float(), left.float(), right.float(), alpha=scale).to(weight.dtype)


def install(model: PreTrainedModel, settings: LoraSettings, *, source: str, head: str = "", learns: bool) -> Adapter:
    """Put PEFT's layers into a model, before ranks divide it; nothing but the adapter and a new head learn.

    Args:
        model: on the CPU or without memory.
        settings: of the adapter.
        source: where the model came from, which the adapter's files tell.
        head: name of a head of one output, which learns beside the adapter; empty for a vocabulary's.
        learns: whether A and B do: then they, and such a head, are float32; else they have the model's dtype.

    Raises:
        RunError: the model lacks what the settings name, or its layers hold more than plain matrices, or matrices
            smaller than the rank; or the folder that it begins from does not fit.
    """
    from peft import inject_adapter_in_model

    known = settings.resolved()
    names = _targets(model, known)
    known.refuse_rank({name: tuple(model.get_parameter(f"{name}.weight").shape) for name in names})
    model.requires_grad_(requires_grad=False)
    bare = _config(model, known, names, source, "")
    inject_adapter_in_model(bare, model, low_cpu_mem_usage=True)
    layers: dict[str, Any] = {f"{name}.weight": model.get_submodule(name) for name in names}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        for layer in layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part[_NAME].to_empty(device="cpu")
            layer.reset_lora_parameters(_NAME, bare.init_lora_weights)
    told = _config(model, known, _shortest(model, names), source, head)
    adapter = Adapter(model, layers, told, head, settings.from_folder is not None, settings.sync == "alone")
    if head and learns:
        model.get_submodule(head).float()
    if settings.from_folder is not None:
        _read(adapter, settings.from_folder)
    for name, parameter in adapter.own().items():
        if learns:
            parameter.requires_grad_()
        elif not adapter.is_heads(name):
            parameter.data = parameter.data.to(model.dtype)
    return adapter


def _targets(model: PreTrainedModel, settings: LoraSettings) -> list[str]:
    """Names of the modules that have an adapter.

    Raises:
        RunError: see `install`.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
    modules = {f"{name}.weight": module for name, module in model.named_modules() if id(module) in inside}
    matrices = [name for name, module in modules.items() if isinstance(module, (torch.nn.Linear, Conv1D))]
    if settings.modules == ALL_LINEAR:
        others = {
            type(module).__name__
            for module in modules.values()
            for p in module.parameters(recurse=False)
            if p.dim() > 1 and not isinstance(module, (torch.nn.Linear, Conv1D))
        }
        if others:
            raise RunError(
                f"adapter.modules: layers of model type {model.config.model_type} have more than plain matrices: "
                f"{', '.join(sorted(others))}, which all-linear would leave out",
                hints=[f"name those that shall have an adapter, of {', '.join(_last_parts(matrices))}"],
            )
    chosen = [name.removesuffix(".weight") for name in settings.chosen(matrices)]
    joined = sorted(name for name in modules if name.removesuffix(".weight").endswith(".experts"))
    if joined and (inside_mlp := [name for name in chosen if ".mlp." in name]):
        raise RunError(
            f"adapter.modules: {', '.join(_last_parts(inside_mlp))} are matrices beside the experts of model type "
            f"{model.config.model_type}, and the experts' own would be left out",
            hints=["name matrices of attention, such as q_proj, k_proj, v_proj, o_proj"],
        )
    return chosen


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.removesuffix(".weight").rpartition(".")[2] for name in names})


def _shortest(model: PreTrainedModel, names: list[str]) -> list[str]:
    """What PEFT's files call the modules: by the ends of their names, where these mean no other module."""
    short = _last_parts(names)
    reached = {name for name, _ in model.named_modules() if name.rpartition(".")[2] in short}
    return short if reached == set(names) else names


def _config(model: PreTrainedModel, settings: LoraSettings, names: list[str], source: str, head: str) -> LoraConfig:
    from peft import LoraConfig

    alpha = settings.alpha
    return LoraConfig(
        r=settings.rank,
        lora_alpha=int(alpha) if alpha.is_integer() else alpha,  # servers read an integer
        target_modules=names,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        init_lora_weights=True if settings.initialization == "kaiming" else "gaussian",
        task_type="SEQ_CLS" if head else "CAUSAL_LM",
        modules_to_save=[head] if head else None,
        base_model_name_or_path=source,
    )


def _read(adapter: Adapter, folder: Path) -> None:
    """Fill the adapter, and the head where the files have one, from PEFT's files.

    Raises:
        RunError: they cannot be read, hold NaN or infinity, or are another model's.
    """
    path = folder / ADAPTER_WEIGHTS
    read_shapes(folder)  # says in words what is wrong with the file
    tensors = {name.removeprefix(_PREFIX): value for name, value in load_file(path).items()}
    if damaged := [name for name, value in tensors.items() if not torch.isfinite(value).all()]:
        raise RunError(
            f"the adapter '{path}' cannot be trained: its tensor '{damaged[0]}' holds NaN or infinity",
            hints=["take an adapter of an earlier checkpoint, or begin anew: leave out adapter.from_folder"],
        )
    own = adapter.own()
    missing = [name for name in own if name not in tensors and not adapter.is_heads(name)]
    wrong = [name for name, value in tensors.items() if name not in own or own[name].shape != value.shape]
    if missing or wrong:
        odd = (missing or wrong)[0]
        shapes = [tuple(t[odd].shape) if odd in t else "nothing" for t in (own, tensors)]
        raise RunError(
            f"the adapter '{path}' does not fit the model: of '{odd}' the model has {shapes[0]}, the file {shapes[1]}",
            hints=["adapter.from_folder must be of the same base model, as its base_model_name_or_path says"],
        )
    for name, value in tensors.items():
        place, _, kind = name.rpartition(".")
        module = adapter.model.get_submodule(place if adapter.is_heads(name) else f"{place}.{_NAME}")
        setattr(module, kind, torch.nn.Parameter(value.to(own[name].dtype), requires_grad=False))
