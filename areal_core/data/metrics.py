"""Metrics that know how to combine: over micro-batches, ranks and updates, each by its own kind."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a part of a batch, which `+` combines with those of other parts.

    Create it with `mean`, `sum`, `maximum`, `histogram` or `effective_share`.

    Attributes:
        kind: how parts combine.
        values: [n] float64 on the device of the inputs: the weighted sum of a mean, a sum, a maximum, the counts of a
            histogram, or the sum of weights and the sum of squared weights of an effective share.
        weights: [n] float64: the sum of weights of a mean, the number of weights of an effective share, otherwise 0.
        bounds: upper bounds of a histogram's bins. The last bin has the values above all bounds.

    Example:
        >>> parts = [Metric.mean(torch.tensor([1.0, 3.0])), Metric.mean(torch.tensor([8.0]))]
        >>> (parts[0] + parts[1]).as_numbers("loss")
        {'loss': 4.0}
    """

    kind: Literal["mean", "sum", "max", "histogram", "effective_share"]
    values: torch.Tensor
    weights: torch.Tensor
    bounds: tuple[float, ...] = ()

    @classmethod
    def mean(cls, values: torch.Tensor | float, weights: torch.Tensor | float = 1.0) -> Metric:
        """Weighted mean of values [T]. Weights are [T], such as a mask, or a number. Values of weight 0 are ignored."""
        value = torch.as_tensor(values, dtype=torch.float64).detach()
        weight = torch.as_tensor(weights, dtype=torch.float64, device=value.device).expand_as(value)
        total = torch.where(weight != 0, value, 0.0) * weight
        return cls("mean", total.sum().reshape(1), weight.sum().reshape(1))

    @classmethod
    def sum(cls, values: torch.Tensor | float) -> Metric:
        """Sum of values [T]."""
        total = torch.as_tensor(values, dtype=torch.float64).detach().sum().reshape(1)
        return cls("sum", total, torch.zeros_like(total))

    @classmethod
    def maximum(cls, values: torch.Tensor | float) -> Metric:
        """Maximum of values [T], with T of 1 or more."""
        largest = torch.as_tensor(values, dtype=torch.float64).detach().max().reshape(1)
        return cls("max", largest, torch.zeros_like(largest))

    @classmethod
    def histogram(cls, values: torch.Tensor, bounds: Sequence[float]) -> Metric:
        """Histogram of values [T] with ascending upper bounds of its bins."""
        edges = torch.tensor(bounds, dtype=torch.float64, device=values.device)
        bins = torch.bucketize(values.detach().double(), edges, right=True)
        counts = torch.bincount(bins, minlength=len(bounds) + 1).double()
        return cls("histogram", counts, torch.zeros_like(counts), tuple(bounds))

    @classmethod
    def effective_share(cls, weights: torch.Tensor, mask: torch.Tensor) -> Metric:
        """Kish's effective sample size over the sample size: (Σ w)² / (n Σ w²) of weights [T] inside a mask [T].

        It is 1 if all weights are equal.
        """
        inside = torch.where(mask, weights.detach().double(), 0.0)
        values = torch.stack([inside.sum(), inside.square().sum()])
        return cls("effective_share", values, mask.sum().double().expand(2).clone())

    def __add__(self, other: Metric) -> Metric:
        """Combine the metrics of two parts.

        Raises:
            ValueError: the metrics are of different kinds.
        """
        if (self.kind, self.bounds) != (other.kind, other.bounds):
            raise ValueError(f"a metric is a {self.kind} in one place and a {other.kind} in another")
        values = torch.maximum(self.values, other.values) if self.kind == "max" else self.values + other.values
        return Metric(self.kind, values, self.weights + other.weights, self.bounds)

    def as_numbers(self, name: str) -> dict[str, float]:
        """Return the value for `metrics.jsonl`: one number, or the share of each bin of a histogram."""
        if self.kind == "mean":
            return {name: float(self.values / self.weights) if float(self.weights) else 0.0}
        if self.kind == "effective_share":
            total, squares = self.values.tolist()
            return {name: total**2 / (squares * float(self.weights[0])) if squares else 0.0}
        if self.kind != "histogram":
            return {name: float(self.values)}
        shares = (self.values / self.values.sum().clamp(min=1)).tolist()
        labels = [*(f"below_{bound:g}" for bound in self.bounds), "above"]
        return {f"{name}/{label}": share for label, share in zip(labels, shares, strict=True)}


def combine(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Combine the metrics of several parts by name. A metric may be missing in some parts.

    Raises:
        ValueError: two parts use one name for metrics of different kinds.

    Example:
        >>> from areal_core.data import Metric, combine
        >>> microbatches = [{"loss": Metric.mean(torch.tensor([1.0, 3.0]))}, {"loss": Metric.mean(8.0)}]
        >>> combine(microbatches)["loss"].as_numbers("loss")
        {'loss': 4.0}
    """
    combined: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            try:
                combined[name] = combined[name] + metric if name in combined else metric
            except ValueError as error:
                raise ValueError(f"'{name}': {error}; two parts use the same name") from None
    return combined


def reduce_over_ranks(metrics: Mapping[str, Metric]) -> dict[str, Metric]:
    """Combine the metrics of all ranks. Every rank gets the result on the CPU. Ranks may have different names.

    This is a collective operation: every rank must call it. Without a process group, the result is the rank's own.

    Raises:
        ValueError: ranks use one name for different metrics. All ranks raise it.

    Example:
        >>> from areal_core.data import Metric, reduce_over_ranks
        >>> own = {"loss": Metric.mean(torch.tensor([1.0, 3.0])), "tokens": Metric.sum(2)}
        >>> for name, metric in reduce_over_ranks(own).items():  # in a run of one rank
        ...     print(metric.as_numbers(name))
        {'loss': 2.0}
        {'tokens': 2.0}
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return {name: replace(m, values=m.values.cpu(), weights=m.weights.cpu()) for name, m in metrics.items()}
    known = _agree_on_forms({name: [m.kind, list(m.bounds), len(m.values)] for name, m in metrics.items()})
    sums, largest = [], []
    for name, (kind, _, size) in known.items():
        metric = metrics.get(name)
        values = torch.zeros(size, dtype=torch.float64) if metric is None else metric.values.cpu()
        weights = torch.zeros(size, dtype=torch.float64) if metric is None else metric.weights.cpu()
        sums += [torch.zeros_like(values) if kind == "max" else values, weights]
        largest.append(values if kind == "max" and metric is not None else torch.full_like(values, -torch.inf))
    if not known:
        return {}
    total, maximum = torch.cat(sums), torch.cat(largest)
    dist.all_reduce(total)
    dist.all_reduce(maximum, dist.ReduceOp.MAX)
    reduced, start, place = {}, 0, 0
    for name, (kind, bounds, size) in known.items():
        values, weights = total[start : start + size], total[start + size : start + 2 * size]
        chosen = maximum[place : place + size] if kind == "max" else values
        reduced[name] = Metric(kind, chosen, weights, tuple(bounds))
        start, place = start + 2 * size, place + size
    return reduced


def _agree_on_forms(own: dict[str, Any]) -> dict[str, Any]:
    """Return name, kind, bounds and size of every metric of any rank, in the same order on all ranks.

    Usually all ranks have the same metrics. Then they exchange only a digest of 8 bytes.

    Raises:
        ValueError: one name belongs to different metrics. All ranks raise it, so that no rank waits for another.
    """
    text = json.dumps(own, sort_keys=True).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    span = torch.tensor([digest, -digest, len(text)])
    dist.all_reduce(span, dist.ReduceOp.MAX)
    forms = [own]
    if int(span[0]) != -int(span[1]):
        buffer = torch.zeros(int(span[2]), dtype=torch.uint8)
        buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        gathered = [torch.zeros_like(buffer) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, buffer)
        forms = [json.loads(part.numpy().tobytes().rstrip(b"\0")) for part in gathered]
    known: dict[str, Any] = {}
    for name, form in sorted((item for each in forms for item in each.items()), key=lambda item: item[0]):
        if known.setdefault(name, form) != form:
            raise ValueError(f"the metric '{name}' is {known[name]} on one rank and {form} on another")
    return known
