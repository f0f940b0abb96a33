"""Throughput, FLOPs and memory of an engine: the metrics `engine/...` of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_fsdp.planning.decoder import Decoder
    from areal_fsdp.planning.split import Split

PEAK_FLOPS: Final = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "GH200": 989e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
}
"""Dense bfloat16 FLOP/s by a part of the device's name, from its data sheet."""
GIB: Final = 1 << 30


def peak_flops(device: str) -> float | None:
    """Return the bfloat16 FLOP/s of a device by its name, such as `NVIDIA H100 80GB HBM3`; None if unknown."""
    words = f" {device} ".replace("-", " ")
    return next((rate for name, rate in PEAK_FLOPS.items() if f" {name} " in words), None)


@dataclass(slots=True)
class Meter:
    """Accumulates times, tokens, FLOPs and peak memory until `take` is called.

    Args:
        model: sizes of the model, for its FLOPs; None for unknown layers.
        ranks: number of the trainer's ranks.
        peak: FLOP/s of a rank's device in the dtype of the computation, None if unknown.
        memory: bytes of the device, 0 for a CPU.
        learning: number of an adapter's parameters; None without an adapter.
    """

    model: Decoder | None
    ranks: int
    peak: float | None = None
    memory: int = 0
    learning: int | None = None
    _train_s: float = field(default=0.0, init=False)
    _forward_s: float = field(default=0.0, init=False)
    _flops: float = field(default=0.0, init=False)
    _tokens: int = field(default=0, init=False)
    _slots: int = field(default=0, init=False)
    _rounds: int = field(default=0, init=False)
    _held: float = field(default=0.0, init=False)

    def passed(self, seconds: float) -> None:
        """Count a forward pass without gradients."""
        self._forward_s += seconds

    def trained(self, seconds: float, done: Iterable[tuple[Sequence[int], Split]], held: float) -> None:
        """Count an update.

        Args:
            seconds: duration of the update.
            done: for each batch, the lengths of all its sequences, and its split.
            held: peak bytes of a rank, 0 if they are not measured.
        """
        self._train_s += seconds
        self._held = max(self._held, held)
        for lengths, split in done:
            self._tokens += sum(lengths)
            self._slots += split.slots
            self._rounds += split.rounds
            self._flops += self.model.training_flops(lengths, self.learning) if self.model is not None else 0.0

    def take(self) -> dict[str, float]:
        """Return the metrics since the last call, by name, and reset them. Metrics that do not apply are left out."""
        metrics = {"forward_s": self._forward_s} if self._forward_s else {}
        if self._train_s:
            metrics |= {
                "train_s": self._train_s,
                "tokens_per_s": self._tokens / self._train_s,
                "microbatches": float(self._rounds),
                "waste": 1 - self._tokens / self._slots,
            }
            rate = self._flops / self._train_s / self.ranks
            metrics |= {"tflops_per_s": rate / 1e12} if rate else {}
            metrics |= {"mfu": rate / self.peak} if rate and self.peak is not None else {}
        if self._held:
            metrics |= {"peak_memory_gib": self._held / GIB, "peak_memory_share": self._held / self.memory}
        self._train_s = self._forward_s = self._flops = self._held = 0.0
        self._tokens = self._slots = self._rounds = 0
        return metrics
