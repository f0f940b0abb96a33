"""Losses and corrections by index, written from the papers in Python's own floats: components are held against them.

Each loss takes the tokens of one sequence that are in the loss and gives of each its loss and the derivative of the
sequence's summed loss by its log-probability; each correction gives a weight for each token. Nothing here knows a
tensor, so the same numbers can be made in any framework.
"""

import math
from typing import NamedTuple


class Token(NamedTuple):
    """One token in the loss: three log-probabilities and an advantage; and two of each of the likeliest tokens."""

    logprob: float
    proximal: float
    behavior: float
    advantage: float
    top: tuple = ()
    behavior_top: tuple = ()


def ppo_clip(tokens, clip_low, clip_high, dual_clip):
    """PPO, arXiv 1707.06347, equation 7; the dual bound of arXiv 1912.09729, equation 5."""
    found = []
    for token in tokens:
        ratio, advantage = math.exp(token.logprob - token.proximal), token.advantage
        surrogate, slope = ratio * advantage, ratio * advantage
        bounded = min(max(ratio, 1 - clip_low), 1 + clip_high) * advantage
        if bounded < surrogate:
            surrogate, slope = bounded, 0.0
        if dual_clip is not None and advantage < 0 and surrogate < dual_clip * advantage:
            surrogate, slope = dual_clip * advantage, 0.0
        found.append((-surrogate, -slope))
    return found


def sapo(tokens, temperature_positive, temperature_negative):
    """SAPO, arXiv 2511.20347: 4/τ times the sigmoid of τ (r - 1)."""
    found = []
    for token in tokens:
        ratio = math.exp(token.logprob - token.proximal)
        tau = temperature_positive if token.advantage > 0 else temperature_negative
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        found.append((-4 / tau * gate * token.advantage, -4 * gate * (1 - gate) * ratio * token.advantage))
    return found


def reinforce(tokens):
    """Williams, 1992."""
    return [(-token.advantage * token.logprob, -token.advantage) for token in tokens]


def gspo(tokens, clip_low, clip_high):
    """GSPO-token, arXiv 2507.18071: the sequence's ratio, and each token the gradient of its own log-probability."""
    ratio = math.exp(sum(token.logprob - token.proximal for token in tokens) / len(tokens))
    bounded = min(max(ratio, 1 - clip_low), 1 + clip_high)
    found = []
    for token in tokens:
        plain, clipped = ratio * token.advantage, bounded * token.advantage
        found.append((-plain, -plain) if plain <= clipped else (-clipped, 0.0))
    return found


def gmpo(tokens, clip_low, clip_high):
    """GMPO, arXiv 2507.20673: min(s d, clip(s d)) with the sign s of the advantage, and its mean in the exponent."""
    total, inside = 0.0, []
    for token in tokens:
        sign, limit = (1, clip_high) if token.advantage > 0 else (-1, clip_low)
        log_ratio = sign * (token.logprob - token.proximal)
        clipped = min(max(log_ratio, -limit), limit)
        bounded = min(log_ratio, clipped)
        inside.append(bounded == log_ratio)
        total += sign * bounded
    ratio = math.exp(total / len(tokens))
    losses = [-ratio * token.advantage for token in tokens]
    return [(loss, loss if free else 0.0) for loss, free in zip(losses, inside, strict=True)]


def cispo(tokens, clip_low, clip_high):
    """MiniMax-M1, arXiv 2506.13585: the weight is a constant."""
    found = []
    for token in tokens:
        weight = min(max(math.exp(token.logprob - token.proximal), 1 - clip_low), 1 + clip_high)
        found.append((-weight * token.advantage * token.logprob, -weight * token.advantage))
    return found


def bernoulli_kl(first, second):
    """Of two probabilities."""
    return first * math.log(first / second) + (1 - first) * math.log((1 - first) / (1 - second))


def dppo(tokens, divergence, threshold_low, threshold_high, cap):
    """DPPO, arXiv 2602.04879: the weight is a constant, 0 where the trust region would be left."""
    found = []
    for token in tokens:
        now, then = math.exp(token.logprob), math.exp(token.behavior)
        distance = abs(now - then) if divergence == "tv" else bernoulli_kl(then, now)
        weight = min(now / then, cap)
        if token.advantage > 0 and now > then and distance > threshold_high:
            weight = 0.0
        if token.advantage < 0 and now < then and distance > threshold_low:
            weight = 0.0
        found.append((-weight * token.advantage * token.logprob, -weight * token.advantage))
    return found


def rollout_importance(tokens, clip_low, clip_high):
    """A constant weight π / μ, 0 where it is out of bounds."""
    low = -math.inf if clip_low is None else 1 - clip_low
    high = math.inf if clip_high is None else 1 + clip_high
    found = []
    for token in tokens:
        ratio = math.exp(token.logprob - token.behavior)
        weight = ratio if low < ratio < high else 0.0
        found.append((-weight * token.advantage * token.logprob, -weight * token.advantage))
    return found


def vespo(tokens, k_positive, lambda_positive, k_negative, lambda_negative):
    """VESPO, arXiv 2602.10693: a constant weight W^k e^(λ (1 - W)), with the product W of a sequence's ratios."""
    product = math.prod(math.exp(token.logprob - token.behavior) for token in tokens)
    found = []
    for token in tokens:
        k, decay = (k_negative, lambda_negative) if token.advantage < 0 else (k_positive, lambda_positive)
        weight = product**k * math.exp(decay * (1 - product))
        found.append((-weight * token.advantage * token.logprob, -weight * token.advantage))
    return found


def score_centering(tokens, cap):
    """Score centering, arXiv 2609.20807: also the derivatives by the log-probabilities of the likeliest tokens."""

    def weight(ratio):
        return 1.0 if cap is None else min(ratio, cap)

    found = []
    for token in tokens:
        policy, sampler = map(math.exp, token.top), map(math.exp, token.behavior_top)
        head = list(zip(policy, sampler, strict=True))
        scale = (1 - sum(q for _, q in head)) / (1 - sum(p for p, _ in head))
        expected = [q * weight(p / q) - scale * weight(1 / scale) * p for p, q in head]
        own = weight(math.exp(token.logprob - token.behavior))
        centered = own * token.logprob - sum(map(math.prod, zip(expected, token.top, strict=True)))
        slopes = [token.advantage * coefficient for coefficient in expected]
        found.append((-token.advantage * centered, -token.advantage * own, slopes))
    return found


def _ratios(tokens):
    return [math.exp(token.proximal - token.behavior) for token in tokens]


def token_truncate(tokens, cap):
    """IMPALA, arXiv 1802.01561."""
    return [min(ratio, cap) for ratio in _ratios(tokens)]


def token_mask(tokens, low, high):
    """IcePop, arXiv 2510.18855."""
    return [ratio if low <= ratio <= high else 0.0 for ratio in _ratios(tokens)]


def sequence_truncate(tokens, cap):
    """The product of all ratios, capped."""
    return [min(math.prod(_ratios(tokens)), cap)] * len(tokens)


def geometric_mask(tokens, low, high):
    """The T-th root of the product of T ratios is within bounds."""
    return [float(low <= math.prod(_ratios(tokens)) ** (1 / len(tokens)) <= high)] * len(tokens)


def product_mask(tokens, low, high):
    """The product of all ratios is within bounds."""
    return [float(low <= math.prod(_ratios(tokens)) <= high)] * len(tokens)


def veto(tokens, low):
    """No ratio is below the bound."""
    return [float(min(_ratios(tokens)) >= low)] * len(tokens)


def opsm(tokens, threshold):
    """DeepSeek-V3.2, arXiv 2512.02556: with the current policy."""
    distance = sum(token.behavior - token.logprob for token in tokens) / len(tokens)
    return [0.0 if token.advantage < 0 and distance > threshold else 1.0 for token in tokens]


def kpop(tokens, threshold):
    """The ratio, where both directions of the Bernoulli divergence are within the bound."""
    found = []
    for token, ratio in zip(tokens, _ratios(tokens), strict=True):
        first, second = math.exp(token.proximal), math.exp(token.behavior)
        inside = max(bernoulli_kl(first, second), bernoulli_kl(second, first)) <= threshold
        found.append(ratio if inside else 0.0)
    return found


def ipo_mask(tokens, threshold):
    """prime-rl's mask: the current and the sampling policy's probability of the token differ by at most the bound."""
    return [float(abs(math.exp(token.logprob) - math.exp(token.behavior)) <= threshold) for token in tokens]
