"""pass@k against counting subsets, and intervals against the share of simulations in which they hold the truth."""

from __future__ import annotations

import itertools
import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_evaluation.pass_at_k import mean_over_prompts, mean_pass_at_k, pass_at_k

pytestmark = pytest.mark.slow


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_it_is_the_share_of_subsets_in_which_one_passes(passed, data):
    k = data.draw(st.integers(1, len(passed)))
    subsets = list(itertools.combinations(passed, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(share, abs=1e-12)


def test_large_numbers_neither_overflow_nor_lose_digits():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5, abs=1e-12)
    assert pass_at_k(2_000, 1_000, 1) == 0.5


@pytest.mark.parametrize(("samples", "passed", "k"), [(4, 2, 5), (4, 2, 0), (4, 5, 1), (4, -1, 1)])
def test_what_cannot_be_estimated_is_refused(samples, passed, k):
    with pytest.raises(ValueError, match="cannot be estimated"):
        pass_at_k(samples, passed, k)


def test_prompts_with_too_few_samples_are_left_out_and_rounding_does_not_fail_an_answer():
    rewards = {0: [0.1 + 0.2 + 0.7 - 2e-16, 0.0], 1: [1.0], 2: [0.0, 0.0]}
    one, two = mean_pass_at_k(rewards, 1), mean_pass_at_k(rewards, 2)
    assert (one.value, one.prompts) == (0.5, 3)
    assert (two.value, two.prompts) == (0.5, 2)
    assert mean_pass_at_k(rewards, 3) is None
    assert mean_pass_at_k({0: [0.4], 1: [0.6]}, 1, threshold=0.5).value == 0.5


def coverage(prompts, samples, k, draw, truth, simulations=400):
    """The share of simulated evaluations whose interval holds the true pass@k."""
    generator, held = random.Random(f"{prompts}/{samples}/{k}"), 0
    for _ in range(simulations):
        rewards = {}
        for prompt in range(prompts):
            chance = draw(generator)
            rewards[prompt] = [float(generator.random() < chance) for _ in range(samples)]
        estimate = mean_pass_at_k(rewards, k)
        held += estimate.low <= truth <= estimate.high
    return held / simulations


@pytest.mark.parametrize(("prompts", "samples"), [(10, 1), (10, 16), (40, 4), (200, 4)])
@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(("a", "b", "minimum"), [(1, 1, 0.92), (0.2, 0.2, 0.92), (50, 50, 0.92), (8, 0.4, 0.85)])
def test_the_interval_holds_the_truth_in_95_of_100_evaluations(prompts, samples, k, a, b, minimum):
    """Samples of a prompt are much alike (0.2, 0.2) or independent (50, 50); or nearly all pass (8, 0.4), next to
    where Wilson's interval is known to dip: Brown, Cai and DasGupta (2001), Statistical Science 16(2)."""
    if k > samples:
        pytest.skip("pass@k needs k samples")
    generator = random.Random(0)
    truth = fmean(1 - (1 - generator.betavariate(a, b)) ** k for _ in range(100_000))
    assert coverage(prompts, samples, k, lambda g: g.betavariate(a, b), truth) >= minimum


def test_samples_of_one_prompt_do_not_count_as_so_many_prompts():
    """All samples of a prompt alike: as wide as with one sample of each, twice as wide as if independent."""
    alike = mean_pass_at_k({prompt: [float(prompt % 2)] * 4 for prompt in range(50)}, 1)
    single = mean_pass_at_k({prompt: [float(prompt % 2)] for prompt in range(50)}, 1)
    independent = mean_pass_at_k({prompt: [float(prompt % 2)] for prompt in range(200)}, 1)
    assert alike[:3] == pytest.approx(single[:3], abs=0.002)
    assert (alike.high - alike.low) / (independent.high - independent.low) == pytest.approx(2, abs=0.1)


def test_all_passing_is_no_certainty():
    estimate = mean_pass_at_k({prompt: [1.0] * 8 for prompt in range(20)}, 1)
    assert estimate.value == 1
    assert estimate.low == pytest.approx(0.82, abs=0.01)
    assert estimate.high == pytest.approx(1)


def test_rewards_beyond_0_and_1_get_students_interval():
    estimate = mean_over_prompts([1.0, 2.0, 3.0, 4.0, 5.0], trials=4)
    # t(0.975, 4) = 2.776 times sqrt(2.5 / 5)
    assert estimate == pytest.approx((3.0, 3 - 1.963, 3 + 1.963, 5, 0.7071), abs=0.01)
    assert mean_over_prompts([7.0], trials=4) == (7.0, None, None, 1, None)
    assert mean_over_prompts([0.5], trials=4) == (0.5, 0.0, 1.0, 1, None)
