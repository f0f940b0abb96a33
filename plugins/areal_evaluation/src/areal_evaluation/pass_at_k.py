"""pass@k, and confidence intervals of means over prompts.

Answers to one prompt are not independent of each other, but prompts are. So the prompt is the unit: a figure is the
mean of one value per prompt, and its uncertainty comes from how these values differ between prompts. This is the
clustered standard error of Miller, "Adding Error Bars to Evals" (2024), arXiv:2411.00640, section 2.2.
"""

from __future__ import annotations

import math
from statistics import NormalDist, fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CONFIDENCE = 0.95
TOLERANCE = 1e-9
"""Rounding tolerance of the threshold: a weighted sum of rewards may be slightly below its exact value."""


class Estimate(NamedTuple):
    """A mean over prompts.

    Attributes:
        value: the mean.
        low, high: bounds of its 95% confidence interval; None if unknown, with a single prompt.
        prompts: number of prompts.
        standard_error: standard error of the mean over prompts; None with a single prompt.
    """

    value: float
    low: float | None
    high: float | None
    prompts: int
    standard_error: float | None


def pass_at_k(samples: int, passed: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k samples of a prompt passes.

    1 - C(n - c, k) / C(n, k): the share of subsets of size k that contain a passing sample. Chen et al.,
    "Evaluating Large Language Models Trained on Code" (2021), arXiv:2107.03374, equation 1.

    Args:
        samples: n, the number of samples of this prompt.
        passed: c, the number of samples that passed.
        k: from 1 to n.

    Raises:
        ValueError: k is not between 1 and n, or c not between 0 and n.
    """
    if not 1 <= k <= samples or not 0 <= passed <= samples:
        raise ValueError(f"pass@{k} cannot be estimated from {passed} of {samples} samples")
    return 1 - math.comb(samples - passed, k) / math.comb(samples, k)


def mean_pass_at_k(rewards: Mapping[int, Sequence[float]], k: int, threshold: float = 1.0) -> Estimate | None:
    """Return the mean pass@k over prompts with at least k samples; None if there is no such prompt.

    Args:
        rewards: rewards of the samples of each prompt.
        k: at least 1.
        threshold: minimum reward of a sample that passes.
    """
    counts = [
        (len(samples), sum(reward >= threshold - TOLERANCE for reward in samples)) for samples in rewards.values()
    ]
    counts = [(samples, passed) for samples, passed in counts if samples >= k]
    if not counts:
        return None
    values = [pass_at_k(samples, passed, k) for samples, passed in counts]
    return mean_over_prompts(values, trials=fmean(samples for samples, _ in counts) / k)


def mean_over_prompts(values: Sequence[float], trials: float) -> Estimate:
    """Return the mean of one value per prompt, with a confidence interval.

    Values within [0, 1] get Wilson's score interval with the effective sample size p (1 - p) / SE^2, after Franco,
    Little, Louis and Slud, "Comparative Study of Confidence Intervals for Proportions in Complex Sample Surveys"
    (2019), Journal of Survey Statistics and Methodology 7(3). It stays within [0, 1] and does not shrink to a point if
    all prompts pass. Other values get Student's interval, which is unreliable below about ten prompts.

    Args:
        values: one value for each prompt, at least one.
        trials: upper bound of the number of independent trials behind a prompt's value: n for a mean of n samples,
            n / k for pass@k. It bounds the effective sample size. If nearly all prompts have the same value, the
            observed differences underestimate the rare ones.
    """
    prompts, mean = len(values), fmean(values)
    is_share = min(values) >= 0 and max(values) <= 1
    if prompts == 1:
        return Estimate(mean, 0.0 if is_share else None, 1.0 if is_share else None, prompts, None)
    quantile, error = _student_quantile(prompts - 1), stdev(values) / math.sqrt(prompts)
    if not is_share:
        return Estimate(mean, mean - quantile * error, mean + quantile * error, prompts, error)
    spread = mean * (1 - mean)
    effective = min(max(1.0, spread / (prompts * error**2)), max(1.0, trials)) * prompts if error else prompts
    weight = quantile**2 / effective
    center = (mean + weight / 2) / (1 + weight)
    half = math.sqrt(weight * (spread + weight / 4)) / (1 + weight)
    return Estimate(mean, max(0.0, center - half), min(1.0, center + half), prompts, error)


def _student_quantile(freedom: int) -> float:
    """Student's two-sided 95% quantile: the normal one, corrected as in Abramowitz and Stegun 26.7.5."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
