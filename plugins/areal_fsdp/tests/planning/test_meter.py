"""A meter's sums, and the FLOPs of a step."""

from __future__ import annotations

import pytest

from areal_fsdp.planning.decoder import Decoder
from areal_fsdp.planning.meter import GIB, Meter, peak_flops
from areal_fsdp.planning.split import Split

MODEL = Decoder(
    layers=2, hidden=8, intermediate=16, query=8, key=4, heads=2, vocabulary=32, words=32, layer_parameters=1000,
    root_parameters=264, largest_layer=500, norms_heads=False, attention_layers=2,
)  # fmt: skip
LENGTHS = [6, 4, 2]


def split(rank: int = 0, ranks: int = 2, max_tokens: int = 6) -> Split:
    units = [[row] for row in range(len(LENGTHS))]
    return Split.plan(LENGTHS, units, rank=rank, ranks=ranks, max_tokens=max_tokens, longest=None)


def test_flops_are_6_n_t_and_causal_attention() -> None:
    assert MODEL.training_flops(LENGTHS) == 6 * (1000 + 8 * 32) * 12 + 6 * 2 * 8 * (36 + 16 + 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_slots_count_the_tokens_of_waiting_ranks(rank: int) -> None:
    assert split(rank).slots == 12, "6 and 4 + 2"
    assert split(rank, max_tokens=5).slots == 16, "6 beside 4, then 2 beside nothing"


def test_a_single_rank_does_not_wait() -> None:
    assert split(ranks=1, max_tokens=5).slots == 12


def test_metrics_cover_the_work_since_the_last_call() -> None:
    meter = Meter(MODEL, ranks=2, peak=1e4, memory=4 * GIB)
    assert meter.take() == {}
    meter.trained(2.0, [(LENGTHS, split(max_tokens=5))], held=GIB)
    meter.trained(1.0, [(LENGTHS, split(max_tokens=5))], held=3 * GIB)
    meter.passed(0.5)
    rate = 2 * MODEL.training_flops(LENGTHS) / 3 / 2
    assert meter.take() == pytest.approx(
        {
            "train_s": 3.0,
            "forward_s": 0.5,
            "tokens_per_s": 8.0,
            "microbatches": 4.0,
            "waste": 0.25,
            "tflops_per_s": rate / 1e12,
            "mfu": rate / 1e4,
            "peak_memory_gib": 3.0,
            "peak_memory_share": 0.75,
        }
    )
    assert meter.take() == {}


def test_unknown_metrics_are_left_out() -> None:
    meter = Meter(None, ranks=1)
    meter.trained(1.0, [(LENGTHS, split(ranks=1))], held=0)
    assert set(meter.take()) == {"train_s", "tokens_per_s", "microbatches", "waste"}


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 2070", None),
    ],
)
def test_peak_flops_of_a_device_by_its_name(name: str, teraflops: float | None) -> None:
    assert peak_flops(name) == (None if teraflops is None else teraflops * 1e12)
