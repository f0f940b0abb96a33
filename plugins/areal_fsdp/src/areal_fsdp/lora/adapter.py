"""A LoRA adapter in a Hugging Face model: PEFT's layers around its matrices, and what goes in and out of them.

PEFT renames `q_proj.weight` to `q_proj.base_layer.weight` and puts `q_proj.lora_A.default.weight` beside it. Towards
the outside names are those of the model's files, and those of PEFT's files.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from transformers.pytorch_utils import Conv1D

from areal_core.errors import RunError
from areal_core.models import views_by_file_name
from areal_fsdp.lora.settings import ALL_LINEAR, DROPOUT
from areal_fsdp.lora.stored import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_shapes
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from peft import LoraConfig
    from transformers import PreTrainedModel

    from areal_fsdp.lora.settings import LoraSettings

log = logging.getLogger(__name__)

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
        frozen: what an adapter on all linear layers leaves as it is in the layers.
        is_on: whether the model computes with the adapter, or as its base alone.
    """

    model: PreTrainedModel
    layers: dict[str, Any]
    config: LoraConfig
    head: str
    begins_elsewhere: bool
    is_synced_alone: bool = False
    frozen: tuple[str, ...] = ()
    is_on: bool = True

    def without(self) -> Adapter:
        """Return a view that computes the base model."""
        return replace(self, is_on=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enable or disable the adapter inside this context, as `is_on` says; it is enabled behind it.

        PEFT's own switch also changes `requires_grad` of A and B, which sharding reads once, at setup.
        """
        self._switch(off=not self.is_on)
        try:
            yield
        finally:
            self._switch(off=False)

    def _switch(self, *, off: bool) -> None:
        for layer in self.layers.values():
            layer._disable_adapters = off

    @contextmanager
    def must_be_called(self) -> Iterator[None]:
        """Within it the model computes something, and each layer with an adapter must take part.

        Kernels of some models read a matrix and pass its layer by: such an adapter would never learn, and one that was
        read from a folder would be merged into weights that the trainer does not compute with.

        Raises:
            RunError: a layer was not called; it names those layers.
        """
        silent = dict(self.layers)
        hooks = [
            layer.register_forward_pre_hook(lambda *_, own=name: silent.pop(own, None) and None)
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if silent:
            names = _kinds(silent)
            others = [name for name in _kinds(self.layers) if name not in names]
            raise RunError(
                f"adapter.modules: model type {self.model.config.model_type} computes without calling the layers "
                f"{', '.join(names)}, such as '{next(iter(silent))}', so their adapters would have no effect",
                hints=[f"name others: modules: [{', '.join(others)}]"],
            )

    @property
    def kinds(self) -> list[str]:
        """The names of the matrices, each once."""
        return _kinds(self.layers)

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
        """Yield name and tensor of each A and B; B is multiplied by alpha / rank, so that alpha is rank.

        Names are those of PEFT's files on a model whose modules are named as in its own files, which servers read.

        Args:
            whole: as in `merged`.
        """
        for layer, stored in zip(self.layers.values(), self.stored_names(), strict=True):
            place = _PREFIX + stored.removesuffix("weight")
            yield f"{place}lora_A.weight", whole(layer.lora_A[_NAME].weight)
            yield f"{place}lora_B.weight", whole(layer.lora_B[_NAME].weight) * layer.scaling[_NAME]

    def stored_names(self) -> list[str]:
        """Return the names that the matrices of `layers` have in the model's files, where transformers renames them.

        Raises:
            RunError: a matrix is joined from several of the files, or the other way around.
        """
        stored: list[str] = []
        for name, layer in self.layers.items():
            weight = torch.empty(layer.base_layer.weight.shape, device="meta")
            found = views_by_file_name(self.model, {name: weight})
            if len(found) != 1:
                raise RunError(
                    f"adapter.sync is alone, and '{name}' of model type {self.model.config.model_type} is made of "
                    f"{len(found)} tensors of its files, so servers cannot load the adapter",
                    hints=["set adapter.sync to merged"],
                )
            stored += found
        return stored

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
        RunError: the model lacks what the settings name, or has matrices smaller than the rank, or PEFT takes none of
            them; or the folder that it begins from does not fit.
    """
    from peft import inject_adapter_in_model

    known = settings.resolved()
    names, frozen = _targets(model, known)
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
    adapter = Adapter(model, layers, told, head, settings.from_folder is not None, settings.sync == "alone", frozen)
    if frozen and rank_and_ranks()[0] == 0:
        on, left = ", ".join(adapter.kinds), ", ".join(frozen)
        log.warning(
            "model type '%s': the adapter is on %s; frozen in its layers are %s", model.config.model_type, on, left
        )
    if adapter.is_synced_alone:
        adapter.stored_names()
    if head and learns:
        model.get_submodule(head).float()
    if settings.from_folder is not None:
        _read(adapter, settings.from_folder)
        _log_dropout(settings.from_folder)
    for name, parameter in adapter.own().items():
        if learns:
            parameter.requires_grad_()
        elif not adapter.is_heads(name):
            parameter.data = parameter.data.to(model.dtype)
    return adapter


def _targets(model: PreTrainedModel, settings: LoraSettings) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the modules that have an adapter, and what `all-linear` leaves frozen in the layers.

    Raises:
        RunError: see `install`.
    """
    layers = decoder_layers(model)
    inside = set(layers.modules())
    modules = {name: module for name, module in model.named_modules() if module in inside}
    matrices = [name for name, module in modules.items() if _is_matrix(module)]
    experts = {name: counts for name, module in modules.items() if (counts := _experts_of(module))}
    parents = {name.rpartition(".")[0] for name in experts}
    blocks = tuple(f"{name}." for name in parents if modules.get(name) not in set(layers))
    refused = {kind: reason for kind in _kinds(matrices) if (reason := _refusal(model, kind))}
    if settings.modules == ALL_LINEAR:
        routers = _routers(model, matrices, experts)
        matrices = [name for name in matrices if name not in routers and _kind(name) not in refused]
    chosen = [name.removesuffix(".weight") for name in settings.chosen(f"{name}.weight" for name in matrices)]
    kind = model.config.model_type
    if odd := sorted(refused.keys() & {_kind(name) for name in chosen}):
        raise RunError(
            f"adapter.modules: PEFT puts no adapter on {', '.join(odd)} of model type {kind}: {refused[odd[0]]}",
            hints=["name other matrices, or write modules: all-linear, which leaves these out"],
        )
    if settings.modules == ALL_LINEAR:
        return chosen, _frozen(modules, chosen)
    if settings.from_folder is None and (of_moe := [name for name in chosen if name.startswith(blocks)]):
        raise RunError(
            f"adapter.modules: {', '.join(_kinds(of_moe))} are matrices beside the experts of model type {kind}, and "
            "the experts' own would be left out",
            hints=["name matrices of attention, such as q_proj, k_proj, v_proj, o_proj; or write modules: all-linear"],
        )
    return chosen, ()


def _is_matrix(module: torch.nn.Module) -> bool:
    """Whether a module is a matrix product of one row each: a subclass of Linear may compute something else."""
    if type(module) in (torch.nn.Linear, Conv1D):
        return True
    if not isinstance(module, torch.nn.Linear):
        return False
    try:
        with torch.no_grad():
            output = module(torch.ones_like(module.weight[:1]))
    except (RuntimeError, ValueError, IndexError):
        return False
    return isinstance(output, torch.Tensor) and output.shape == (1, module.out_features)


def _experts_of(module: torch.nn.Module) -> set[int]:
    """Return how many experts a module holds, as parameters [experts, rows, columns]; empty where it holds none."""
    if hasattr(module, "kernel_size"):  # a convolution's are [channels, channels, width]
        return set()
    return {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3}


def _routers(model: PreTrainedModel, matrices: Iterable[str], experts: Mapping[str, set[int]]) -> set[str]:
    """Return the matrices that score experts: they stand beside these, and have a row for each."""
    counts: dict[str, set[int]] = {}
    for name, own in experts.items():
        counts.setdefault(f"{name.rpartition('.')[0]}.", set()).update(own)
    return {
        name
        for name in matrices
        for block, own in counts.items()
        if name.startswith(block) and len(model.get_submodule(name).weight) in own
    }


def _refusal(model: PreTrainedModel, kind: str) -> str:
    """Return why PEFT puts no adapter on matrices of this name, empty where it does; a file of ours must load in PEFT.

    Kernels of some mixers read a weight past its adapter. Of some MoE models, PEFT takes names of matrices for experts.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[kind])
    try:
        _check_lora_target_modules_mamba(config, model, kind)
        convert_peft_config_for_transformers(config, model, None)
    except ValueError as error:
        return str(error)
    return "" if kind in config.target_modules else "it takes the name for that of experts"


def _frozen(modules: Mapping[str, torch.nn.Module], chosen: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the matrices, and the types of other modules, that an adapter leaves as they are."""
    adapted = set(chosen)
    others = {name: module for name, module in modules.items() if name not in adapted}
    return tuple(
        sorted(
            {
                _kind(name) if _is_matrix(module) else type(module).__name__
                for name, module in others.items()
                if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
            }
        )
    )


def _kind(name: str) -> str:
    """Return the last part of the name of a matrix or of its weight."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _kinds(names: Iterable[str]) -> list[str]:
    return sorted({_kind(name) for name in names})


def _shortest(model: PreTrainedModel, names: list[str]) -> list[str]:
    """What PEFT's files call the modules: by the ends of their names, where these mean no other module."""
    short = _kinds(names)
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


def _log_dropout(folder: Path) -> None:
    """Log that the dropout of a saved adapter is not applied, if it has some."""
    dropout = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(DROPOUT)
    if dropout and rank_and_ranks()[0] == 0:
        log.warning("the adapter '%s' has %s %g: this engine applies no dropout", folder, DROPOUT, dropout)


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
