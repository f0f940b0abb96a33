"""Writes synced weights into one safetensors file, tensor by tensor, without a second copy of the model.

`write_weights` makes a new file. In memory, new pages and copies through pageable memory take most of its time, so
`WeightsFile` overwrites the file of an older version, in pinned pages, once nobody reads it.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import signal
import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import torch

from areal_core.background import start_thread
from areal_core.interfaces.inference import TensorDescription

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from areal_core.interfaces.training import TrainEngine

_NAMES: Final = {
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
_ALIGNMENT: Final = 8


_last: tuple[TrainEngine, tuple[TensorDescription, ...]] | None = None
"""A cache with one entry: a transport, and the folder that it falls back to, describe the same engine at each sync."""


def describe_weights(engine: TrainEngine) -> tuple[TensorDescription, ...]:
    """Return names, dtypes and whole shapes of the tensors that an engine syncs, in its order. Collective."""
    global _last  # noqa: PLW0603 - see above
    if _last is None or _last[0] is not engine:
        _last = engine, tuple(_described(name, value) for name, value in engine.named_meta_parameters())
    return _last[1]


def _described(name: str, value: torch.Tensor) -> TensorDescription:
    return TensorDescription(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))


def size_of(description: TensorDescription) -> int:
    """Return the size of a tensor in bytes."""
    return getattr(torch, description.dtype).itemsize * torch.Size(description.shape).numel()


def write_weights(
    path: Path, descriptions: Sequence[TensorDescription], gathered: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Write a safetensors file (github.com/huggingface/safetensors, "Format").

    Args:
        path: of the file.
        descriptions: of all tensors.
        gathered: names and values of the tensors, in the same order. Each is released before the next one is gathered.

    Raises:
        ValueError: the tensors are not those of the descriptions.
    """
    with path.open("wb") as file:
        file.write(_header(descriptions))
        for value in _expected(descriptions, gathered):
            file.write(_bytes(value).to("cpu").numpy().data)
            del value


class WeightsFile:
    """A safetensors file of synced weights in memory, which later versions with the same tensors overwrite.

    Args:
        path: of a file that `write_weights` made.
        descriptions: of its tensors.
    """

    def __init__(self, path: Path, descriptions: Sequence[TensorDescription]) -> None:
        self._descriptions = descriptions
        self._file = path.open("r+b")
        self._mapping: mmap.mmap | None = None
        self._is_pinned = False

    def is_read(self) -> bool:
        """Return whether another process has the file open or mapped. True if the file system cannot tell.

        The kernel grants a write lease only on a file that nobody else has open (fcntl(2), F_SETLEASE).
        """
        number = self._file.fileno()
        try:
            fcntl.fcntl(number, fcntl.F_SETSIG, signal.SIGURG)  # the default, SIGIO, would end this process
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            fcntl.fcntl(number, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError:
            return True
        return False

    def overwrite(self, gathered: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy other values into the pages of the file. The caller has asked `is_read`.

        Args:
            gathered: as in `write_weights`. A GPU copies its values into pinned pages; they are waited for at the end.

        Raises:
            ValueError: the tensors are not those of the descriptions.
        """
        if self._mapping is None:
            self._mapping = mmap.mmap(self._file.fileno(), 0)
        target = torch.frombuffer(self._mapping, dtype=torch.uint8)
        end, gpu = len(_header(self._descriptions)), None
        for value in _expected(self._descriptions, gathered):
            if value.is_cuda and gpu is None:
                gpu = value.device
                self._is_pinned = self._is_pinned or _pin(target)
            content = _bytes(value)
            start, end = end, end + content.numel()
            target[start:end].copy_(content, non_blocking=value.is_cuda)
            del value, content
        if gpu is not None:
            torch.cuda.current_stream(gpu).synchronize()

    def close(self) -> None:
        """Unmap and close the file."""
        if self._mapping is not None:
            if self._is_pinned:
                address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
                _cudart().cudaHostUnregister(address)
            with suppress(BufferError):  # the traceback of a failed write still holds the tensor
                self._mapping.close()
        self._file.close()


def _pin(memory: torch.Tensor) -> bool:
    """Pin pages for copies from a GPU. Where the driver refuses (WSL may), copies are slower and as correct.

    A refusal stays the last error of the thread that asked, where PyTorch would report it for the next kernel.
    """
    codes: list[Any] = []

    def register() -> None:
        codes.append(_cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    start_thread(register, "pinning").join()
    return [int(code) for code in codes] == [0]


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _header(descriptions: Sequence[TensorDescription]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in descriptions:
        start, end = end, end + size_of(tensor)
        header[tensor.name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def _expected(
    descriptions: Sequence[TensorDescription], gathered: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Yield each value, and hold none of them when the next one is gathered.

    Raises:
        ValueError: the tensors are not those of the descriptions.
    """
    expected = iter(descriptions)
    for name, value in gathered:
        wanted = next(expected, None)
        found = _described(name, value)
        if found != wanted:
            raise ValueError(f"the engine yielded {found}, expected {wanted}: it must keep the described order")
        yield value.detach()
        del value
    if (missing := next(expected, None)) is not None:
        raise ValueError(f"the engine did not yield {missing.name}")


def _bytes(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)
