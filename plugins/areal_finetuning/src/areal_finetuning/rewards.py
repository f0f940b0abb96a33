"""Reward for algorithms that use none. This module does not import torch, because reward processes load it."""

from __future__ import annotations


def no_reward() -> float:
    """Return 0 for every answer. Workflows need a reward; distillation ignores it."""
    return 0.0
