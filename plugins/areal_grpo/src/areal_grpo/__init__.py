"""GRPO, PPO and their relatives for areal, and the demonstration."""

__version__ = "0.1.0"
