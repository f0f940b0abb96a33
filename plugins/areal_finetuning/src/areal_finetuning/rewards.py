"""A reward for those who learn without one. Imports no torch: rewards have a process of their own."""

from __future__ import annotations


def no_reward() -> float:
    """0 for every answer: workflows ask for a reward, and distillation does not look at it."""
    return 0.0
