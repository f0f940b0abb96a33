"""Load a Hugging Face model in parts: each rank reads only its shards, or rank 0 reads one layer at a time.

1. transformers builds the model on the `meta` device, which shows the name of each tensor in the files.
2. The ranks shard the meta tensors.
3. PyTorch's reader of safetensors copies each rank's slices into its shards.

Weights that the files lack, such as a new head, are initialized whole by transformers on every rank. Buffers are whole
on every rank too; those in the files are read.
"""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load as read
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, GenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils import hub as _hub
from transformers.utils import logging as _transformers_logging

from areal_core.errors import RunError
from areal_core.models import Placeholder
from areal_fsdp.parallel.file_names import Piece, own_rows, pieces_of
from areal_fsdp.parallel.ranks import on_any_rank

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from transformers import PreTrainedModel

    _Loaded = tuple[PreTrainedModel, dict[str, Any], "ModelFiles | None"]

log = logging.getLogger(__name__)
hub: Any = _hub
transformers_logging: Any = _transformers_logging
"""Typed as Any: the functions of both modules have no types."""


class ModelFiles:
    """A model's safetensors files, and the parameters that are read from them.

    Args:
        source: the model's folder or hub name, for messages.
        paths: the files' paths.
    """

    def __init__(self, source: str, paths: Sequence[str]) -> None:
        self._source = source
        self._reader = _Reader(paths)
        self._keys: dict[str, str] = {}
        self._joined: dict[str, dict[str, Piece]] = {}

    @classmethod
    def find(cls, source: str) -> ModelFiles | None:
        """Return the safetensors files of a folder or a hub name, downloading the latter; None if there are none."""
        single = hub.cached_file(source, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
        if single is not None:
            return cls(source, [single])
        index = hub.cached_file(source, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
        return None if index is None else cls(source, hub.get_checkpoint_shard_files(source, index)[0])

    def placeholders(self) -> dict[str, Placeholder]:
        """Return a placeholder for each tensor, by its name in the files: it has the tensor's shape and no values."""
        known: Any = self._reader.read_metadata().state_dict_metadata
        return {key: Placeholder(entry.size) for key, entry in known.items()}

    def recognize(self, model: PreTrainedModel, placeholders: dict[str, Placeholder]) -> str:
        """Find the tensors of the files that each parameter of the model is read from: one tensor, or several joined.

        Args:
            model: the model that transformers made from the placeholders.
            placeholders: the result of `placeholders`.

        Returns:
            The name of a parameter or buffer that no tensor of the files can fill; empty if there is none.
        """
        made = {_memory(tensor): key for key, entry in placeholders.items() for tensor in entry.made}
        self._keys, self._joined = {}, {}
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                key = made.get(_memory(parameter))
                if not parameter.is_contiguous():
                    return name
                if key is not None and parameter.shape == placeholders[key].shape:
                    self._keys[name] = key
                    continue
                pieces = pieces_of(model, name, parameter)
                if not pieces or any(
                    key not in placeholders or tuple(placeholders[key].shape) != piece.shape
                    for key, piece in pieces.items()
                ):
                    return name
                self._joined[name] = pieces
        return next(iter(self._fill_buffers(model, made)), "")

    def _fill_buffers(self, model: PreTrainedModel, made: Mapping[int, str]) -> list[str]:
        """Read whole buffers on every rank, since they are small; return the names of those that the files lack."""
        buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
        keys = {name: made[_memory(buffer)] for name, buffer in buffers.items() if _memory(buffer) in made}
        for name in keys:
            module_name, _, attribute = name.rpartition(".")
            model.get_submodule(module_name)._buffers[attribute] = torch.empty_like(buffers[name], device="cpu")
        filled = dict(model.named_buffers())
        self._read({key: filled[name] for name, key in keys.items()}, alone=True)
        return [name for name in buffers if name not in keys]

    def unread_names(self, model: PreTrainedModel) -> list[str]:
        """Return the tensors that a model of this class does not read, such as multi-token prediction layers."""
        placeholders = self.placeholders()
        kind: Any = type(model)
        config = deepcopy(model.config)
        vars(config).pop("quantization_config", None)  # the loaded weights are dequantized
        kind.from_pretrained(None, config=config, state_dict=placeholders)
        known = model.state_dict().keys()
        return [key for key, entry in placeholders.items() if not entry.made and key not in known]

    def read_whole(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors by their names in the files; not collective."""
        entries: Any = self._reader.read_metadata().state_dict_metadata
        tensors = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in names}
        self._read(dict(tensors), alone=True)
        return tensors

    def rename(self, names: Mapping[str, str]) -> None:
        """Update the names of the model's parameters; parameters that `names` lacks are no longer read.

        Args:
            names: the new names of the parameters that are still on the meta device, by their old names.
        """
        self._keys = {names[name]: key for name, key in self._keys.items() if name in names}

    def fill(
        self,
        module: torch.nn.Module,
        model: PreTrainedModel,
        device: torch.device,
        of_whole: torch.device | None = None,
    ) -> None:
        """Allocate the model's parameters, and read this rank's shard of each; collective.

        Args:
            module: the root FSDP module around `model`.
            model: the sharded model. The caller must tie unsharded tied parameters again.
            device: device of the shards.
            of_whole: device of parameters that are not sharded; None for `device`.

        Raises:
            RunError: the files cannot be read, on this rank or another.
        """
        root: Any = module

        def allocate(tensor: torch.Tensor) -> torch.Tensor:
            target = device if isinstance(tensor, DTensor) else of_whole or device
            return torch.empty_like(tensor, device=target) if tensor.is_meta else tensor

        root._apply(allocate)
        parameters = dict(model.named_parameters())
        targets: dict[str, Any] = {key: parameters[name] for name, key in self._keys.items()}
        for name, pieces in self._joined.items():
            rows, first = own_rows(parameters[name])
            views = {key: piece.of(rows, first) for key, piece in pieces.items()}
            targets |= {key: view for key, view in views.items() if view is not None}
        self._read(targets, alone=False)

    @contextmanager
    def streamed(self, model: PreTrainedModel, layers: torch.nn.ModuleList) -> Iterator[None]:
        """Let a model on the meta device compute on the CPU inside this context, before it is sharded.

        A forward hook reads each layer before it runs, and frees it afterwards. Modules outside the layers are read and
        freed in the same way, one at a time.
        """
        known = {*self._keys, *self._joined}
        names = {parameter: name for name, parameter in model.named_parameters() if name in known}
        inside = set(layers.modules())
        units = [_Unit([module], names) for module in model.modules() if module not in inside]
        units += [_Unit(list(layer.modules()), names) for layer in layers]
        units = [unit for unit in units if unit.parameters]
        hooks = []
        for unit in units:
            first = unit.modules[0]
            hooks.append(first.register_forward_pre_hook(lambda *_, unit=unit: unit.fill(self._read_unit(unit))))
            hooks.append(first.register_forward_hook(lambda *_, unit=unit: unit.free()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for unit in units:
                unit.free()

    def _read_unit(self, unit: _Unit) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty_like(parameter, device="cpu") for _, _, parameter, name in unit.parameters}
        targets: dict[str, Any] = {}
        for name, tensor in tensors.items():
            pieces = self._joined.get(name)
            targets |= {self._keys[name]: tensor} if pieces is None else {k: p.of(tensor, 0) for k, p in pieces.items()}
        self._read(targets, alone=True)
        return tensors

    def _read(self, tensors: dict[str, Any], *, alone: bool) -> None:
        """Read into `tensors`, which have the files' names; collective unless `alone`."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # intended if `alone`
                read(tensors, storage_reader=self._reader, no_dist=alone)
        except CheckpointException as error:
            causes = {str(cause) for cause, _ in error.failures.values()}
            raise _unreadable(self._source, "; ".join(sorted(causes))) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(self._source, str(error)) from error


class _Reader(HuggingFaceStorageReader):
    """Reads the given files, and caches their headers."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(str(Path(paths[0]).parent))
        self.fs = _Files(paths)
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known


class _Files(FileSystem):
    """A file system that lists the given files for every folder."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def ls(self, path: object) -> list[str]:
        return self._paths


class _Unit:
    """Modules whose parameters are read and freed together; `parameters` has (module, attribute, parameter, name)."""

    def __init__(self, modules: list[torch.nn.Module], names: dict[torch.nn.Parameter, str]) -> None:
        self.modules = modules
        self.parameters = [
            (module, attribute, parameter, names[parameter])
            for module in modules
            for attribute, parameter in module.named_parameters(recurse=False)
            if parameter in names
        ]

    def fill(self, tensors: dict[str, torch.Tensor]) -> None:
        for module, attribute, _, name in self.parameters:
            module._parameters[attribute] = torch.nn.Parameter(tensors[name], requires_grad=False)

    def free(self) -> None:
        for module, attribute, parameter, _ in self.parameters:
            module._parameters[attribute] = parameter


class _OnlyWholeError(RuntimeError):
    """A model cannot be read in parts; the message is the reason."""


_DAMAGE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""Errors of reading that mean damaged files."""
_ONLY_WHOLE = (RuntimeError, TypeError, AttributeError)
"""Errors of reading in parts after which all ranks read the whole model. Damaged files raise again there."""


def load(factory: Any, source: str, *, in_parts: bool, **options: Any) -> _Loaded:
    """Call `factory.from_pretrained` without its messages; collective.

    All ranks read the model in the same way, initialize missing weights with the same values, and fail if one fails.

    Args:
        factory: such as `AutoModelForCausalLM`.
        source: folder or hub name.
        in_parts: True to leave the parameters in the files if possible; otherwise a warning is logged.
        options: `dtype`, `attn_implementation`, `trust_remote_code`; and fields of the config.

    Returns:
        The model, the report of its loading, and its files if the parameters are still to be read. In that case the
        model is on the `meta` device, except for buffers and for weights that the files lack.

    Raises:
        RunError: the model cannot be read, on this rank or another.
    """
    with _quiet(), torch.random.fork_rng(devices=[]):
        if in_parts and (loaded := _on_all_ranks(_load_in_parts, factory, source, options, _ONLY_WHOLE)) is not None:
            return loaded
        loaded = _on_all_ranks(_load_whole, factory, source, options)
        assert loaded is not None  # without `declines`, every error raises
        return loaded


def _on_all_ranks(
    read: Callable[..., _Loaded],
    factory: Any,
    source: str,
    options: dict[str, Any],
    declines: tuple[type[Exception], ...] = (),
) -> _Loaded | None:
    """Call `read` on every rank; return None on all ranks if one of the errors in `declines` is raised on any."""
    loaded, declined, error = None, None, None
    torch.manual_seed(0)
    try:
        loaded = read(factory, source, **options)
    except declines as reason:
        declined = reason
    except Exception as reason:  # noqa: BLE001 - the other ranks wait in on_any_rank
        error = reason
    if on_any_rank(error is not None):
        if isinstance(error, _DAMAGE):
            raise _unreadable(source, str(error)) from error
        raise error or _unreadable(source, "it failed on another rank; see that rank's error")
    if on_any_rank(declined is not None):
        cause = declined or "another rank cannot read it in parts"
        log.warning("'%s': %s. Each rank reads the whole model into its memory", source, cause)
        return None
    return loaded


def _load_whole(factory: Any, source: str, **options: Any) -> _Loaded:
    # transformers' own error names neither tensor nor shapes; the report does.
    options["ignore_mismatched_sizes"] = True
    model, report = factory.from_pretrained(source, output_loading_info=True, **options)
    if wrong := sorted(report.get("mismatched_keys", ())):
        raise _unreadable(source, _of_another_shape(wrong))
    return model, report, None


def _load_in_parts(factory: Any, source: str, **options: Any) -> _Loaded:
    files = ModelFiles.find(source)
    if files is None:
        raise _OnlyWholeError(f"it has neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    of_model = {name: options.pop(name) for name in ("dtype", "attn_implementation")}
    config = AutoConfig.from_pretrained(source, **options)
    if getattr(config, "quantization_config", None) or getattr(config, "transformers_weights", None):
        raise _OnlyWholeError("its weights are quantized, or its config names other files")
    with torch.device("meta"):
        empty = factory.from_config(config, trust_remote_code=options["trust_remote_code"], **of_model)
    placeholders = files.placeholders()
    model, report = type(empty).from_pretrained(
        None, config=empty.config, state_dict=placeholders, output_loading_info=True, **of_model
    )
    if unknown := files.recognize(model, placeholders):
        raise _OnlyWholeError(
            f"'{unknown}' is neither one of the files' tensors nor made of several, each inside one of its rows"
        )
    model.name_or_path = model.config.name_or_path = source
    if model.can_generate():
        with suppress(OSError):  # without generation_config.json, the defaults from the config stay
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model, report, files


def unread_weights(model: PreTrainedModel, source: str, *, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    """Read the tensors of a model's files that its class does not read.

    Returns:
        The tensors by their names in the files. Empty if the model is not of the class that its config names, such as
        a critic, or if the names cannot be determined, which is logged.
    """
    names = unread_names(model, source, trust_remote_code=trust_remote_code)
    files = ModelFiles.find(source) if names else None
    return {} if files is None else files.read_whole(names)


def unread_names(model: PreTrainedModel, source: str, *, trust_remote_code: bool) -> list[str]:
    """Return the names of `unread_weights`."""
    files = ModelFiles.find(source)
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    if files is None or type(model).__name__ not in (config.architectures or ()):
        return []
    try:
        with _quiet():
            return files.unread_names(model)
    except (RuntimeError, TypeError, AttributeError) as error:
        log.warning("'%s': the export lacks weights that its class does not read, if there are any: %s", source, error)
        return []


def refuse_damaged_weights(model: PreTrainedModel) -> None:
    """Raise `RunError` if a parameter, or this rank's shard of it, holds NaN or infinity."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in parameters.items()}
    if damaged := [name for name, value in local.items() if not torch.isfinite(value).all()]:
        others = f", and so do {len(damaged) - 1} more" if len(damaged) > 1 else ""
        raise _unreadable(str(model.name_or_path), f"its tensor '{damaged[0]}' holds NaN or infinity{others}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress progress bars and transformers' report of missing weights, which the caller checks."""
    verbosity, has_bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if has_bars:
            transformers_logging.enable_progress_bar()


def _unreadable(source: str, reason: str) -> RunError:
    return RunError(
        f"the model '{source}' cannot be loaded: {reason}",
        hints=["check the folder: config.json, *.safetensors; or download it again"],
    )


def _of_another_shape(wrong: list[tuple[str, Any, Any]]) -> str:
    (name, stored, needed), *more = wrong
    others = f"; {len(more)} more tensors differ" if more else ""
    return f"'{name}' has shape {list(stored)} in its files, but its config.json needs {list(needed)}{others}"


def _memory(tensor: torch.Tensor) -> int:
    """Return an id of the memory behind a tensor; meta tensors have distinct ids too."""
    return tensor.untyped_storage()._cdata
