"""Seconds to write the weights of a sync to a file in memory, by several ways in turn.

    python benchmarks/weights_file.py [--parameters 135e6 1.5e9] [--tensors 300] [--rounds 5] [--device cuda]

`areal` is `areal_core/training/weights_file.py`, which overwrites an older file. The others write the same bytes:

- `write`: one blocking copy to the CPU and one write for each tensor, into a new file
- `rewrite`: the same into the pages of an older file
- `buffer`: all tensors into one buffer, which is pinned for a GPU, then one write of it into a new file
- `threads`: one write for each tensor into a new file, in four threads
- `map`: copies straight into a mapping of a new file
- `remap`: copies into a mapping of an older file, which stays mapped, and pinned for a GPU

The first round, in which older files and buffers are new, is shown apart; `areal` pins in the second. Ratios are
to `write` in the same rounds.
Set OMP_NUM_THREADS=1 on a CPU that has other work.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from areal_core.interfaces.inference import TensorDescription
from areal_core.training.weights_file import WeightsFile, size_of, write_weights

if TYPE_CHECKING:
    from collections.abc import Callable

Tensors = list[tuple[str, torch.Tensor]]
THREADS = 4


def bytes_of(value: torch.Tensor) -> memoryview:
    """The bytes of a tensor, copied to the CPU."""
    own = value.detach().to("cpu").contiguous()
    return own.reshape(-1).view(torch.uint8).numpy().data


class Ways:
    """All ways over the same tensors. `offsets` are where each begins in the file."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self._folder, self._tensors = folder, tensors
        self._descriptions = [TensorDescription(name, "bfloat16", tuple(value.shape)) for name, value in tensors]
        sizes = [size_of(described) for described in self._descriptions]
        self._offsets = [0]
        for size in sizes:
            self._offsets.append(self._offsets[-1] + size)
        self._is_cuda = tensors[0][1].is_cuda
        self._buffer: torch.Tensor | None = None
        self._mapped: torch.Tensor | None = None
        self._overwritten: WeightsFile | None = None
        self._new = folder / "new"

    def ways(self) -> dict[str, Callable[[], None]]:
        """All ways by name; `write` comes first."""
        return {
            "write": self.write, "areal": self.areal, "rewrite": self.rewrite, "buffer": self.buffer,
            "threads": self.threads, "map": self.map, "remap": self.remap,
        }  # fmt: skip

    def clean(self) -> None:
        """Remove the new file, whose pages are given back outside of the measured time."""
        self._new.unlink(missing_ok=True)

    def unpin(self) -> None:
        """Unpin the mappings: another one may get their addresses."""
        if self._overwritten is not None:
            self._overwritten.close()
        if self._is_cuda and self._mapped is not None:
            torch.cuda.cudart().cudaHostUnregister(self._mapped.data_ptr())

    def areal(self) -> None:
        """As areal does it."""
        if self._overwritten is None:
            write_weights(self._folder / "areal", self._descriptions, iter(self._tensors))
            self._overwritten = WeightsFile(self._folder / "areal", self._descriptions)
        elif not self._overwritten.is_read():
            self._overwritten.overwrite(iter(self._tensors))

    def write(self) -> None:
        """A write for each tensor, into a new file."""
        with self._new.open("wb") as file:
            for _, value in self._tensors:
                file.write(bytes_of(value))

    def rewrite(self) -> None:
        """A write for each tensor, into an older file."""
        path = self._folder / "older"
        path.touch()
        with path.open("r+b") as file:
            for _, value in self._tensors:
                file.write(bytes_of(value))

    def buffer(self) -> None:
        """One write of a buffer."""
        if self._buffer is None:
            self._buffer = torch.empty(self._offsets[-1], dtype=torch.uint8, pin_memory=self._is_cuda)
        self._copy(self._buffer)
        with self._new.open("wb") as file:
            file.write(self._buffer.numpy().data)

    def threads(self) -> None:
        """Writes in several threads."""
        with self._new.open("wb") as file, ThreadPoolExecutor(THREADS) as pool:
            number = file.fileno()
            list(pool.map(lambda pair: self._put(number, *pair), zip(self._tensors, self._offsets, strict=False)))

    @staticmethod
    def _put(number: int, named: tuple[str, torch.Tensor], offset: int) -> None:
        left = bytes_of(named[1])
        while left:
            written = os.pwrite(number, left, offset)
            left, offset = left[written:], offset + written

    def map(self) -> None:
        """Copies into a mapping of a new file."""
        with self._new.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, self._offsets[-1])
            with mmap.mmap(file.fileno(), self._offsets[-1]) as mapping:
                target = torch.frombuffer(mapping, dtype=torch.uint8)
                self._copy(target)
                del target

    def remap(self) -> None:
        """Copies into a mapping that stays."""
        if self._mapped is None:
            with (self._folder / "mapped").open("w+b") as file:
                os.posix_fallocate(file.fileno(), 0, self._offsets[-1])
                mapping = mmap.mmap(file.fileno(), self._offsets[-1])
            self._mapped = torch.frombuffer(mapping, dtype=torch.uint8)
            if self._is_cuda:
                torch.cuda.cudart().cudaHostRegister(self._mapped.data_ptr(), self._offsets[-1], 0)
        self._copy(self._mapped)

    def _copy(self, target: torch.Tensor) -> None:
        for (_, value), (start, end) in zip(self._tensors, pairwise(self._offsets), strict=True):
            target[start:end].view(torch.bfloat16).view(value.shape).copy_(value, non_blocking=True)
        if self._is_cuda:
            torch.cuda.synchronize()


def measure(parameters: int, tensors: int, rounds: int, device: str) -> None:
    """Measure all ways in turn for one size of model and print a table."""
    size = parameters // tensors // 64 * 64
    values = [(f"layers.{n}.weight", torch.randn(64, size // 64, device=device).bfloat16()) for n in range(tensors)]
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="areal-benchmark-") as folder:
        ways = Ways(Path(folder), values)
        seconds: dict[str, list[float]] = {name: [] for name in ways.ways()}
        for _ in range(rounds + 1):
            for name, way in ways.ways().items():
                began = time.perf_counter()
                way()
                seconds[name].append(time.perf_counter() - began)
                ways.clean()
        ways.unpin()
    gigabytes = tensors * size * 2 / 1e9
    print(f"{gigabytes:.2f} GB in {tensors} tensors, {device}, {torch.get_num_threads()} threads of PyTorch")
    print(f"{'way':8s} {'first':>7s} {'median':>7s} {'GB/s':>6s} {'ratio':>6s}")
    for name, (first, *later) in seconds.items():
        ratio = statistics.median(one / other for one, other in zip(later, seconds["write"][1:], strict=True))
        median = statistics.median(later)
        print(f"{name:8s} {first:7.3f} {median:7.3f} {gigabytes / median:6.2f} {ratio:6.2f}", flush=True)


def main() -> None:
    """Measure what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, nargs="+", default=[135e6, 1.5e9])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    for parameters in arguments.parameters:
        measure(int(parameters), arguments.tensors, arguments.rounds, arguments.device)


if __name__ == "__main__":
    main()
