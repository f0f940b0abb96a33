"""Metrics against numbers worked out by hand, over any split, and over ranks that have different ones."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import Metric, combine, reduce_over_ranks

KINDS = {
    "mean": Metric.mean,
    "sum": lambda values, weights: Metric.sum(values),
    "max": lambda values, weights: Metric.maximum(values),
    "histogram": lambda values, weights: Metric.histogram(values, (-1.0, 0.5, 2.0)),
}
FINITE = st.floats(-100, 100, width=32)


def number(metric):
    """The one number of a metric that has one."""
    (value,) = metric.as_numbers("x").values()
    return value


def test_numbers_by_hand():
    values = torch.tensor([1.0, 2.0, 6.0])
    assert number(Metric.mean(values)) == 3
    assert number(Metric.mean(values, torch.tensor([3.0, 1.0, 0.5]))) == pytest.approx((3 + 2 + 3) / 4.5)
    assert number(Metric.sum(values)) == 9
    assert number(Metric.maximum(-values)) == -1
    assert Metric.mean(4.0).as_numbers("reward") == {"reward": 4.0}
    assert number(Metric.sum(torch.tensor([True, False, True]))) == 2
    assert number(Metric.maximum(torch.tensor([3, 5, 4]))) == 5


def test_numbers_of_python_keep_their_digits():
    for made in (Metric.mean, Metric.sum, Metric.maximum):
        assert number(made(0.1)) == 0.1
    assert number(Metric.mean(0.1, 0.3)) == pytest.approx(0.1, rel=1e-15)


def test_long_sums_keep_their_digits():
    """Float32 stops counting at 2^24."""
    ones = torch.ones(1 << 24)
    assert number(Metric.sum(ones) + Metric.sum(1.0)) == (1 << 24) + 1


def test_a_metric_carries_no_gradients():
    values = torch.ones(3, requires_grad=True) * 2
    for make in KINDS.values():
        metric = make(values, torch.ones(3))
        assert not metric.values.requires_grad
        assert not metric.weights.requires_grad


def test_a_mask_hides_whatever_is_behind_it():
    values = torch.tensor([1.0, math.nan, math.inf, 3.0])
    assert number(Metric.mean(values, torch.tensor([True, False, False, True]))) == 2
    assert math.isnan(number(Metric.mean(values, torch.tensor([True, True, False, True]))))


def test_a_mean_of_nothing_is_0_and_takes_no_part():
    nothing = Metric.mean(torch.tensor([5.0]), torch.tensor([False]))
    assert number(nothing) == 0
    assert number(Metric.mean(torch.empty(0))) == 0
    assert number(nothing + Metric.mean(7.0)) == 7


def test_a_histogram_counts_between_its_bounds():
    """A value that equals a bound is above it."""
    metric = Metric.histogram(torch.tensor([-5.0, -1.0, 0.0, 0.4, 0.5, 9.0, 2.0, 1.9]), (-1.0, 0.5, 2.0))
    assert metric.values.tolist() == [1, 3, 2, 2]
    assert metric.as_numbers("x") == {"x/below_-1": 0.125, "x/below_0.5": 0.375, "x/below_2": 0.25, "x/above": 0.25}
    empty = Metric.histogram(torch.empty(0), (0.0,))
    assert empty.as_numbers("x") == {"x/below_0": 0.0, "x/above": 0.0}


@pytest.mark.parametrize("kind", KINDS)
@given(st.data())
def test_any_split_gives_the_same(kind, data):
    values = torch.tensor(data.draw(st.lists(FINITE, min_size=1, max_size=12)))
    weights = torch.tensor(data.draw(st.lists(st.floats(0, 4, width=32), min_size=len(values), max_size=len(values))))
    parts = torch.tensor(data.draw(st.lists(st.integers(0, 3), min_size=len(values), max_size=len(values))))
    make = KINDS[kind]
    split = [{"x": make(values[parts == part], weights[parts == part])} for part in parts.unique()]
    found, wanted = combine(split)["x"].as_numbers("x"), make(values, weights).as_numbers("x")
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_a_name_that_only_some_parts_have_is_of_those():
    parts = [
        {"a": Metric.mean(1.0), "b": Metric.sum(1.0)},
        {"a": Metric.mean(4.0, 2.0)},
        {"b": Metric.sum(5.0), "c": Metric.maximum(-2.0)},
    ]
    assert {name: number(metric) for name, metric in combine(parts).items()} == {"a": 3, "b": 6, "c": -2}
    assert combine([]) == {}


@pytest.mark.parametrize(
    "other", [Metric.sum(1.0), Metric.maximum(1.0), Metric.histogram(torch.ones(1), (0.0,))], ids=lambda m: m.kind
)
def test_one_name_is_one_kind(other):
    with pytest.raises(ValueError, match=f"is a mean in one place and a {other.kind} in another"):
        combine([{"x": Metric.mean(1.0)}, {"x": other}])


def test_histograms_of_other_bounds_do_not_add_up():
    with pytest.raises(ValueError, match="a histogram in one place"):
        Metric.histogram(torch.ones(1), (0.0,)) + Metric.histogram(torch.ones(1), (1.0,))


def test_one_process_is_all_ranks():
    metrics = {"x": Metric.mean(3.0), "y": Metric.histogram(torch.ones(2), (0.0,))}
    reduced = reduce_over_ranks(metrics)
    assert {name: metric.as_numbers(name) for name, metric in reduced.items()} == {
        name: metric.as_numbers(name) for name, metric in metrics.items()
    }


RANK = """
import json, sys
import torch, torch.distributed as dist
from areal_core.data import Metric, reduce_over_ranks
rank, ranks, store, target = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
found = []
def reduce(own):
    try:
        numbers = {}
        for name, metric in reduce_over_ranks(own).items():
            numbers |= metric.as_numbers(name)
        found.append(numbers)
    except ValueError as error:
        found.append(str(error))
spread = torch.arange(3.0) + rank
same = {"mean": Metric.mean(spread, torch.full((3,), 1.0 + rank)), "sum": Metric.sum(spread),
        "max": Metric.maximum(-spread), "histogram": Metric.histogram(spread, (1.0, 3.0))}
reduce(same)
reduce({"everywhere": Metric.sum(1.0), f"only_{rank}": Metric.maximum(-10.0 - rank), **({} if rank else same)})
reduce({} if rank else same)
reduce({})
reduce({"x": Metric.mean(1.0) if rank else Metric.histogram(spread, (1.0, 3.0))})
reduce(dict(reversed(same.items())) if rank else same)
with open(target, "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What three ranks found, one list of results each."""
    folder = tmp_path_factory.mktemp("ranks")
    words = [[str(rank), "3", str(folder / "store"), str(folder / f"rank{rank}.json")] for rank in range(3)]
    processes = [
        subprocess.Popen([sys.executable, "-c", RANK, *own], stderr=subprocess.PIPE, text=True) for own in words
    ]
    try:
        for process in processes:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(3)]


SAME = {
    # ranks hold 0 1 2 with weight 1, 1 2 3 with weight 2, 2 3 4 with weight 3
    "mean": (3 + 2 * 6 + 3 * 9) / 18,
    "sum": 18.0,
    "max": 0.0,
    "histogram/below_1": 1 / 9,
    "histogram/below_3": 5 / 9,
    "histogram/above": 3 / 9,
}


@pytest.mark.slow
def test_ranks_with_the_same_names(ranks):
    for found in ranks:
        assert found[0] == pytest.approx(SAME)
        assert found[5] == pytest.approx(SAME), "the order of names does not matter"


@pytest.mark.slow
def test_ranks_with_names_of_their_own(ranks):
    """Nobody waits for ever; what one rank has is known to all, also a maximum below 0."""
    for found in ranks:
        assert found[1]["everywhere"] == 3
        assert [found[1][f"only_{rank}"] for rank in range(3)] == [-10, -11, -12]
        assert found[1]["mean"] == 1
        shares = {"histogram/below_1": 1 / 3, "histogram/below_3": 2 / 3, "histogram/above": 0}
        assert found[2] == pytest.approx({"mean": 1, "sum": 3, "max": 0, **shares})
        assert found[3] == {}


def test_one_name_for_two_kinds_is_an_error_on_every_rank(ranks):
    """Of another size than the others' it would leave them waiting."""
    (told,) = {found[4] for found in ranks}
    assert "the metric 'x' is ['histogram', [1.0, 3.0], 3] on one rank and ['mean', [], 1] on another" in told
