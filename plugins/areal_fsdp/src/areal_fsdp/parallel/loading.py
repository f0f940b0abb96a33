"""Reading a Hugging Face model in parts: each rank its own shards, or one layer after another.

transformers builds the model without memory (on the `meta` device) and says which of its tensors stands under which
name in the files; ranks divide it as it is; then PyTorch's reader of safetensors copies each rank's slices into place.
Weights that the files lack, such as a new head, are there at once, whole, as transformers makes them; so are buffers,
of which those that the files have are read.
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
"""Its functions have no types, and those of `hub` neither."""


class ModelFiles:
    """A model's safetensors files, and where its tensors stand in them.

    Args:
        source: the model's folder or hub name, for messages.
        paths: of the files.
    """

    def __init__(self, source: str, paths: Sequence[str]) -> None:
        self._source = source
        self._reader = _Reader(paths)
        self._keys: dict[str, str] = {}
        self._joined: dict[str, dict[str, Piece]] = {}

    @classmethod
    def find(cls, source: str) -> ModelFiles | None:
        """Return the safetensors files of a folder or a hub name; None if there are none. Download those of the hub."""
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
        """Find the files' tensors that each parameter of the model is read from: one of them, or several joined.

        Args:
            model: made by transformers from the placeholders.
            placeholders: from `placeholders`.

        Returns:
            The name of a parameter or buffer that comes from no tensor of the files; empty if all are found.
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
                    own not in placeholders or tuple(placeholders[own].shape) != piece.shape
                    for own, piece in pieces.items()
                ):
                    return name
                self._joined[name] = pieces
        return next(iter(self._fill_buffers(model, made)), "")

    def _fill_buffers(self, model: PreTrainedModel, made: Mapping[int, str]) -> list[str]:
        """Read the buffers whole on every rank, since they are small; return the names of those that the files lack."""
        buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_meta}
        keys = {name: made[_memory(buffer)] for name, buffer in buffers.items() if _memory(buffer) in made}
        for name in keys:
            place, _, own = name.rpartition(".")
            model.get_submodule(place)._buffers[own] = torch.empty_like(buffers[name], device="cpu")
        filled = dict(model.named_buffers())
        self._read({key: filled[name] for name, key in keys.items()}, alone=True)
        return [name for name in buffers if name not in keys]

    def unread_names(self, model: PreTrainedModel) -> list[str]:
        """Return what a model of this class leaves in its files, such as layers of multi-token prediction, by name."""
        placeholders = self.placeholders()
        kind: Any = type(model)
        config = deepcopy(model.config)
        vars(config).pop("quantization_config", None)  # no longer true: the model's weights are plain
        kind.from_pretrained(None, config=config, state_dict=placeholders)
        known = model.state_dict().keys()
        return [key for key, entry in placeholders.items() if not entry.made and key not in known]

    def read_whole(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read tensors by their names in the files; not collective."""
        entries: Any = self._reader.read_metadata().state_dict_metadata
        found = {key: torch.empty(entries[key].size, dtype=entries[key].properties.dtype) for key in names}
        self._read(dict(found), alone=True)
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Follow a renaming of the model's parameters; parameters that are not named are no longer read.

        Args:
            names: the new names of the parameters that have no memory yet, by the names that they were loaded under.
        """
        self._keys = {names[name]: key for name, key in self._keys.items() if name in names}

    def fill(
        self,
        module: torch.nn.Module,
        model: PreTrainedModel,
        device: torch.device,
        of_whole: torch.device | None = None,
    ) -> None:
        """Give the model's parameters memory, and read what this rank has of each; collective.

        Args:
            module: the root of sharding, around `model`.
            model: divided, and sharded: plain tensors that are tied would have to be tied again.
            device: where shards are kept.
            of_whole: where parameters are kept that ranks do not divide; None for the same place.

        Raises:
            RunError: the files cannot be read, here or on another rank.
        """
        root: Any = module

        def with_memory(tensor: torch.Tensor) -> torch.Tensor:
            place = device if isinstance(tensor, DTensor) else of_whole or device
            return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor

        root._apply(with_memory)
        parameters = dict(model.named_parameters())
        wanted: dict[str, Any] = {key: parameters[name] for name, key in self._keys.items()}
        for name, pieces in self._joined.items():
            rows, first = own_rows(parameters[name])
            own = {key: piece.of(rows, first) for key, piece in pieces.items()}
            wanted |= {key: view for key, view in own.items() if view is not None}
        self._read(wanted, alone=False)

    @contextmanager
    def streamed(self, model: PreTrainedModel, layers: torch.nn.ModuleList) -> Iterator[None]:
        """Let a model without memory compute on the CPU, before it is divided.

        Each layer is read before it runs and given up behind it, and so is each part that is not a layer's.
        """
        known = {*self._keys, *self._joined}
        names = {parameter: name for name, parameter in model.named_parameters() if name in known}
        inside = set(layers.modules())
        units = [_Unit([module], names) for module in model.modules() if module not in inside]
        units += [_Unit(list(layer.modules()), names) for layer in layers]
        units = [unit for unit in units if unit.places]
        hooks = []
        for unit in units:
            hooks.append(unit.modules[0].register_forward_pre_hook(lambda *_, unit=unit: unit.hold(self._whole(unit))))
            hooks.append(unit.modules[0].register_forward_hook(lambda *_, unit=unit: unit.give_up()))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for unit in units:
                unit.give_up()

    def _whole(self, unit: _Unit) -> dict[str, torch.Tensor]:
        found = {name: torch.empty_like(parameter, device="cpu") for _, _, parameter, name in unit.places}
        wanted: dict[str, Any] = {}
        for name, tensor in found.items():
            pieces = self._joined.get(name)
            wanted |= {self._keys[name]: tensor} if pieces is None else {k: p.of(tensor, 0) for k, p in pieces.items()}
        self._read(wanted, alone=True)
        return found

    def _read(self, tensors: dict[str, Any], *, alone: bool) -> None:
        """Copy from the files, by the files' names; collective unless `alone`."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # what `alone` asks for
                read(tensors, storage_reader=self._reader, no_dist=alone)
        except CheckpointException as error:
            causes = {str(cause) for cause, _ in error.failures.values()}
            raise _unreadable(self._source, "; ".join(sorted(causes))) from error
        except (OSError, RuntimeError, ValueError) as error:
            raise _unreadable(self._source, str(error)) from error


class _Reader(HuggingFaceStorageReader):
    """Reads some of a folder's files, and their headers once."""

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(str(Path(paths[0]).parent))
        self.fs = _Files(paths)
        self._known: Metadata | None = None

    def read_metadata(self) -> Metadata:
        if self._known is None:
            self._known = super().read_metadata()
        return self._known


class _Files(FileSystem):
    """A file system that lists given files in any folder."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = list(paths)

    def ls(self, path: object) -> list[str]:
        return self._paths


class _Unit:
    """Modules whose parameters have memory at the same time."""

    def __init__(self, modules: list[torch.nn.Module], names: dict[torch.nn.Parameter, str]) -> None:
        self.modules = modules
        self.places = [
            (module, own, parameter, names[parameter])
            for module in modules
            for own, parameter in module.named_parameters(recurse=False)
            if parameter in names
        ]

    def hold(self, tensors: dict[str, torch.Tensor]) -> None:
        for module, own, _, name in self.places:
            module._parameters[own] = torch.nn.Parameter(tensors[name], requires_grad=False)

    def give_up(self) -> None:
        for module, own, parameter, _ in self.places:
            module._parameters[own] = parameter


class _OnlyWholeError(RuntimeError):
    """Why a model cannot be read in parts."""


_DAMAGE = (OSError, ValueError, KeyError, RuntimeError, SafetensorError)
"""Errors of reading that say that a model's files are at fault."""
_ONLY_WHOLE = (RuntimeError, TypeError, AttributeError)
"""Errors of reading in parts after which all ranks read the whole model: an error in its files comes up again then."""


def load(factory: Any, source: str, *, in_parts: bool, **options: Any) -> _Loaded:
    """Call `factory.from_pretrained` without its messages; collective. All ranks draw the same weights where the files
    lack some, all read the model in the same way, and all fail where one does.

    Args:
        factory: such as `AutoModelForCausalLM`.
        source: folder or hub name.
        in_parts: whether parameters shall stay in the files, where that is possible; the log says where it is not.
        options: `dtype`, `attn_implementation`, `trust_remote_code`; and those of the config.

    Returns:
        The model; the report of its loading; its files, if its parameters are still there. Then it is on the `meta`
        device, but for buffers and for what the files lack.

    Raises:
        RunError: it cannot be read, here or on another rank.
    """
    with _quiet(), torch.random.fork_rng(devices=[]):
        if in_parts and (loaded := _on_all_ranks(_load_in_parts, factory, source, options, _ONLY_WHOLE)) is not None:
            return loaded
        loaded = _on_all_ranks(_load_whole, factory, source, options)
        assert loaded is not None  # nothing declines here
        return loaded


def _on_all_ranks(
    read: Callable[..., _Loaded],
    factory: Any,
    source: str,
    options: dict[str, Any],
    declines: tuple[type[Exception], ...] = (),
) -> _Loaded | None:
    """Read a model in one way on every rank; None on all of them where one of `declines` is raised on any."""
    loaded, why, error = None, None, None
    torch.manual_seed(0)
    try:
        loaded = read(factory, source, **options)
    except declines as found:
        why = found
    except Exception as found:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
        error = found
    if on_any_rank(error is not None):
        if isinstance(error, _DAMAGE):
            raise _unreadable(source, str(error)) from error
        raise error or _unreadable(source, "it failed on another rank, whose own message says why")
    if on_any_rank(why is not None):
        cause = why or "another rank cannot read it in parts"
        log.warning("'%s': %s. Each rank reads the whole model into its memory", source, cause)
        return None
    return loaded


def _load_whole(factory: Any, source: str, **options: Any) -> _Loaded:
    options["ignore_mismatched_sizes"] = True  # transformers names neither tensor nor shapes; the report does
    model, report = factory.from_pretrained(source, output_loading_info=True, **options)
    if wrong := sorted(report.get("mismatched_keys", ())):
        raise _unreadable(source, _of_another_shape(wrong))
    return model, report, None


def _load_in_parts(factory: Any, source: str, **options: Any) -> _Loaded:
    files = ModelFiles.find(source)
    if files is None:
        raise _OnlyWholeError(f"there is neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}")
    of_model = {name: options.pop(name) for name in ("dtype", "attn_implementation")}
    config = AutoConfig.from_pretrained(source, **options)
    if getattr(config, "quantization_config", None) or getattr(config, "transformers_weights", None):
        raise _OnlyWholeError("its config asks for other weights than those of the files")
    with torch.device("meta"):
        empty = factory.from_config(config, trust_remote_code=options["trust_remote_code"], **of_model)
    placeholders = files.placeholders()
    model, report = type(empty).from_pretrained(
        None, config=empty.config, state_dict=placeholders, output_loading_info=True, **of_model
    )
    if unknown := files.recognize(model, placeholders):
        raise _OnlyWholeError(f"'{unknown}' is neither one of the files' tensors nor joined of whole ones in its rows")
    model.name_or_path = model.config.name_or_path = source
    if model.can_generate():
        with suppress(OSError):  # few have this file; those without go by their config
            model.generation_config = GenerationConfig.from_pretrained(source)
    return model, report, files


def unread_weights(model: PreTrainedModel, source: str, *, trust_remote_code: bool) -> dict[str, torch.Tensor]:
    """Read the tensors of a model's files that its class does not read.

    Returns:
        The tensors by their names in the files. Empty if the model has another class than its files, as a critic has,
        or if the names cannot be found out, which is logged.
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
    except (RuntimeError, TypeError, AttributeError) as why:
        log.warning("'%s': the export lacks weights that its class does not read, if there are some: %s", source, why)
        return []


def refuse_damaged_weights(model: PreTrainedModel) -> None:
    """Raise `RunError` where a tensor of this rank's holds NaN or infinity; for models whose outputs are not finite."""
    parameters: dict[str, Any] = dict(model.named_parameters())
    own = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in parameters.items()}
    if odd := [name for name, value in own.items() if not torch.isfinite(value).all()]:
        more = f", and so do {len(odd) - 1} more" if len(odd) > 1 else ""
        raise _unreadable(str(model.name_or_path), f"its tensor '{odd[0]}' holds NaN or infinity{more}")


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


def _unreadable(source: str, why: str) -> RunError:
    return RunError(
        f"the model '{source}' cannot be loaded: {why}",
        hints=["check the folder: config.json, *.safetensors; or download it again"],
    )


def _of_another_shape(wrong: list[tuple[str, Any, Any]]) -> str:
    (name, stored, needed), *more = wrong
    others = f", and {len(more)} more tensors differ" if more else ""
    return f"'{name}' has shape {list(stored)} in its files, and its config.json needs {list(needed)}{others}"


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
