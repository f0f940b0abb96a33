"""A LoRA adapter in a Hugging Face model: installation, merging, export and loading.

PEFT renames `q_proj.weight` to `q_proj.base_layer.weight` and adds `q_proj.lora_A.default.weight`. This module's
results use the names of the model's files and of PEFT's files instead.
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
"""PEFT's name of the only adapter."""
_BASE, _ADAPTER = ".base_layer.", f".{_NAME}."
_PREFIX = "base_model.model."
"""Prefix of all names in PEFT's files."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A model's adapter; made by `install`.

    Attributes:
        model: the model with PEFT's layers.
        layers: PEFT's layers by the name of their matrix in the model's files.
        config: PEFT's config.
        head: name of a scalar head that learns in addition to the adapter; empty if there is none.
        begins_elsewhere: True if the adapter was read from a folder, so that the initial model is not the base.
        is_synced_alone: True if a weight sync sends only A and B.
        frozen: names of the matrices and types of the modules that `all-linear` leaves without an adapter.
        is_on: True if the model computes with the adapter, False if it computes the base model.
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
        """Return a view of this adapter that computes the base model."""
        return replace(self, is_on=False)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Enable or disable the adapter inside this context according to `is_on`; enable it on exit.

        PEFT's own switch is not used: it changes `requires_grad` of A and B, which FSDP reads once, at setup.
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
        """Check that a forward pass inside this context calls every layer with an adapter.

        Kernels of some models read a matrix without calling its layer. A new adapter would never learn there, and an
        adapter from a folder would be merged into weights that the trainer does not compute with.

        Raises:
            RunError: layers were not called; the message names them.
        """
        uncalled = dict(self.layers)
        hooks = [
            layer.register_forward_pre_hook(lambda *_, name=name: uncalled.pop(name, None) and None)
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if uncalled:
            names = _short_names(uncalled)
            others = [name for name in _short_names(self.layers) if name not in names]
            raise RunError(
                f"adapter.modules: model type {self.model.config.model_type} computes without calling the layers "
                f"{', '.join(names)}, such as '{next(iter(uncalled))}', so their adapters would have no effect",
                hints=[f"set modules: [{', '.join(others)}]"],
            )

    @property
    def kinds(self) -> list[str]:
        """Last parts of the matrices' names, such as `q_proj`, sorted and without duplicates."""
        return _short_names(self.layers)

    def meta_names(self) -> dict[str, str]:
        """Return the names of parameters on the meta device in the model, by their names before `install`."""
        return {name.replace(_BASE, "."): name for name, value in self.model.named_parameters() if value.is_meta}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return A, B and the head's parameters, by their names in PEFT's files without PEFT's prefix."""
        return {
            name.replace(_ADAPTER, "."): value
            for name, value in self.model.named_parameters()
            if _ADAPTER in name or self.is_of_head(name)
        }

    def is_of_head(self, name: str) -> bool:
        """Return True for a parameter of the head that learns in addition to the adapter."""
        return bool(self.head) and name.startswith(f"{self.head}.")

    def merged(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each parameter of the model with the adapter merged; tied parameters come once.

        W + alpha / rank x B A is computed in float32 and rounded to W's dtype.

        Args:
            whole: gathers a sharded parameter into one tensor; may be collective.
        """
        for name, parameter in self.model.named_parameters():
            if _ADAPTER in name:
                continue
            base_name = name.replace(_BASE, ".")
            tensor = whole(parameter)
            layer = self.layers.get(base_name)
            if layer is not None and self.is_on:
                tensor = _merge(tensor, whole(layer.lora_A[_NAME].weight), whole(layer.lora_B[_NAME].weight), layer)
            yield base_name, tensor

    def alone(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of each A and B. B is multiplied by alpha / rank, so that readers use alpha = rank.

        The names are those of PEFT's files for a model whose modules have the names of its own files: servers read
        these.

        Args:
            whole: as in `merged`.
        """
        for layer, stored in zip(self.layers.values(), self.stored_names(), strict=True):
            prefix = _PREFIX + stored.removesuffix("weight")
            yield f"{prefix}lora_A.weight", whole(layer.lora_A[_NAME].weight)
            yield f"{prefix}lora_B.weight", whole(layer.lora_B[_NAME].weight) * layer.scaling[_NAME]

    def stored_names(self) -> list[str]:
        """Return the names of the matrices of `layers` in the model's files; transformers may rename them on loading.

        Raises:
            RunError: a matrix is not stored as exactly one tensor of the files.
        """
        stored: list[str] = []
        for name, layer in self.layers.items():
            weight = torch.empty(layer.base_layer.weight.shape, device="meta")
            names = views_by_file_name(self.model, {name: weight})
            if len(names) != 1:
                raise RunError(
                    f"adapter.sync is alone, but '{name}' of model type {self.model.config.model_type} is stored as "
                    f"{len(names)} tensors, so servers cannot load the adapter",
                    hints=["set adapter.sync to merged"],
                )
            stored += names
        return stored

    def export(
        self, folder: Path, learned: Mapping[str, torch.Tensor], whole: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Write only the adapter, in PEFT's format; collective.

        Args:
            folder: the target folder.
            learned: parameters or their float32 masters, by the names of `parameters`; empty for a frozen adapter.
            whole: as in `merged`.

        Raises:
            RunError: the files cannot be written.
        """
        rank, _ = rank_and_ranks()
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in (learned or self.parameters()).items():
            tensor = whole(parameter)
            if rank == 0:
                tensors[_PREFIX + name] = tensor.to("cpu", copy=True).contiguous()
        failure: Exception | None = None
        if rank == 0:
            try:
                self.config.save_pretrained(str(folder))
                save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
            except Exception as error:  # noqa: BLE001 - the other ranks wait in fail_together
                failure = error
        fail_together(failure, f"exporting the adapter to '{folder}'")


def _merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, layer: Any) -> torch.Tensor:
    """Return W + scaling x B A in W's shape and dtype.

    Args:
        weight: W, [out, in]; [in, out] in GPT-2's layers.
        a: [rank, in].
        b: [out, rank].
        layer: PEFT's layer.
    """
    left, right = (a.T, b.T) if layer.fan_in_fan_out else (b, a)
    scale = layer.scaling[_NAME]
    return torch.addmm(weight.float(), left.float(), right.float(), alpha=scale).to(weight.dtype)


def install(model: PreTrainedModel, settings: LoraSettings, *, source: str, head: str = "", learns: bool) -> Adapter:
    """Put PEFT's layers into a model before it is sharded, and freeze everything except the adapter and a scalar head.

    Args:
        model: on the CPU or on the meta device.
        settings: the adapter's settings.
        source: folder or hub name of the base model, which PEFT's config records.
        head: name of a scalar head, which learns in addition to the adapter; empty for a vocabulary head.
        learns: True: A, B and the scalar head are trained, in float32. False: A and B have the model's dtype.

    Raises:
        RunError: the model has no matrix of a name in `modules`, PEFT does not support a matrix, the rank is larger
            than every matrix, or the adapter in `from_folder` does not fit the model.
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
        torch.manual_seed(settings.seed)  # all ranks draw the same values
        for layer in layers.values():
            for part in (layer.lora_A, layer.lora_B):
                part[_NAME].to_empty(device="cpu")
            layer.reset_lora_parameters(_NAME, bare.init_lora_weights)
    adapter = Adapter(
        model,
        layers,
        _config(model, known, _names_for_peft(model, names), source, head),
        head,
        begins_elsewhere=settings.from_folder is not None,
        is_synced_alone=settings.sync == "alone",
        frozen=frozen,
    )
    if frozen and rank_and_ranks()[0] == 0:
        log.warning(
            "model type '%s': the adapter is on %s; frozen in its layers are %s",
            model.config.model_type,
            ", ".join(adapter.kinds),
            ", ".join(frozen),
        )
    if adapter.is_synced_alone:
        adapter.stored_names()  # raises if servers could not load the adapter
    if head and learns:
        model.get_submodule(head).float()
    if settings.from_folder is not None:
        _read(adapter, settings.from_folder)
        _log_dropout(settings.from_folder)
    for name, parameter in adapter.parameters().items():
        if learns:
            parameter.requires_grad_()
        elif not adapter.is_of_head(name):
            parameter.data = parameter.data.to(model.dtype)
    return adapter


def _targets(model: PreTrainedModel, settings: LoraSettings) -> tuple[list[str], tuple[str, ...]]:
    """Return the names of the modules that get an adapter, and `Adapter.frozen`.

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
    refused = {name: reason for name in _short_names(matrices) if (reason := _refusal(model, name))}
    if settings.modules == ALL_LINEAR:
        routers = _routers(model, matrices, experts)
        matrices = [name for name in matrices if name not in routers and _short_name(name) not in refused]
    chosen = [name.removesuffix(".weight") for name in settings.chosen(f"{name}.weight" for name in matrices)]
    model_type = model.config.model_type
    if unsupported := sorted(refused.keys() & set(_short_names(chosen))):
        raise RunError(
            f"adapter.modules: PEFT puts no adapter on {', '.join(unsupported)} of model type {model_type}: "
            f"{refused[unsupported[0]]}",
            hints=["name other matrices, or set modules: all-linear, which leaves these out"],
        )
    if settings.modules == ALL_LINEAR:
        return chosen, _frozen(modules, chosen)
    if settings.from_folder is None and (of_moe := [name for name in chosen if name.startswith(blocks)]):
        raise RunError(
            f"adapter.modules: {', '.join(_short_names(of_moe))} are matrices beside the experts of model type "
            f"{model_type}, and the experts would get no adapter",
            hints=["name matrices of attention, such as q_proj, k_proj, v_proj, o_proj; or set modules: all-linear"],
        )
    return chosen, ()


def _is_matrix(module: torch.nn.Module) -> bool:
    """Return True if a module multiplies each row by one matrix; some subclasses of Linear compute something else."""
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
    """Return the numbers of experts in a module's parameters [experts, rows, columns]; empty if it has none."""
    if hasattr(module, "kernel_size"):  # a convolution's parameters are [channels, channels, width]
        return set()
    return {len(parameter) for parameter in module.parameters(recurse=False) if parameter.dim() == 3}


def _routers(model: PreTrainedModel, matrices: Iterable[str], experts: Mapping[str, set[int]]) -> set[str]:
    """Return the routers: matrices in the same block as experts, with one row for each expert."""
    counts_by_block: dict[str, set[int]] = {}
    for name, counts in experts.items():
        counts_by_block.setdefault(f"{name.rpartition('.')[0]}.", set()).update(counts)
    return {
        name
        for name in matrices
        for block, counts in counts_by_block.items()
        if name.startswith(block) and len(model.get_submodule(name).weight) in counts
    }


def _refusal(model: PreTrainedModel, name: str) -> str:
    """Return why PEFT supports no adapter on matrices of this short name; empty if it does.

    PEFT must be able to load our files. It refuses weights that Mamba kernels read without calling the layer, and in
    some MoE models it takes the name for that of the fused experts.
    """
    from peft import LoraConfig
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        _check_lora_target_modules_mamba(config, model, name)
        convert_peft_config_for_transformers(config, model, None)
    except ValueError as error:
        return str(error)
    return "" if name in config.target_modules else "it takes the name for that of experts"


def _frozen(modules: Mapping[str, torch.nn.Module], chosen: Iterable[str]) -> tuple[str, ...]:
    """Return the short names of matrices, and the types of other modules with weights, that get no adapter."""
    adapted = set(chosen)
    others = {name: module for name, module in modules.items() if name not in adapted}
    return tuple(
        sorted(
            {
                _short_name(name) if _is_matrix(module) else type(module).__name__
                for name, module in others.items()
                if any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
            }
        )
    )


def _short_name(name: str) -> str:
    """Return the last part of the name of a matrix or of its weight, such as `q_proj`."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _short_names(names: Iterable[str]) -> list[str]:
    return sorted({_short_name(name) for name in names})


def _names_for_peft(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Return `target_modules` of PEFT's config: short names if they match no other module, otherwise whole names."""
    short = _short_names(names)
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
    """Log a warning if a saved adapter has dropout, which this engine does not apply."""
    dropout = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8")).get(DROPOUT)
    if dropout and rank_and_ranks()[0] == 0:
        log.warning("the adapter '%s' has %s %g: this engine applies no dropout", folder, DROPOUT, dropout)


def _read(adapter: Adapter, folder: Path) -> None:
    """Fill the adapter from PEFT's files, and the head if the files have one.

    Raises:
        RunError: the files cannot be read, hold NaN or infinity, or belong to another model.
    """
    path = folder / ADAPTER_WEIGHTS
    read_shapes(folder)  # raises RunError for a damaged file; load_file's own errors explain less
    tensors = {name.removeprefix(_PREFIX): value for name, value in load_file(path).items()}
    if damaged := [name for name, value in tensors.items() if not torch.isfinite(value).all()]:
        raise RunError(
            f"the adapter '{path}' cannot be trained: its tensor '{damaged[0]}' holds NaN or infinity",
            hints=["use the adapter of an earlier checkpoint, or leave adapter.from_folder out for a new adapter"],
        )
    parameters = adapter.parameters()
    missing = [name for name in parameters if name not in tensors and not adapter.is_of_head(name)]
    wrong = [name for name, value in tensors.items() if name not in parameters or parameters[name].shape != value.shape]
    if missing or wrong:
        first = (missing or wrong)[0]
        needed, stored = (tuple(t[first].shape) if first in t else "missing" for t in (parameters, tensors))
        raise RunError(
            f"the adapter '{path}' does not fit the model: '{first}' is {needed} in the model, {stored} in the file",
            hints=["adapter.from_folder must be trained on the same base model; see its base_model_name_or_path"],
        )
    for name, value in tensors.items():
        module_name, _, attribute = name.rpartition(".")
        module = adapter.model.get_submodule(module_name if adapter.is_of_head(name) else f"{module_name}.{_NAME}")
        setattr(module, attribute, torch.nn.Parameter(value.to(parameters[name].dtype), requires_grad=False))
