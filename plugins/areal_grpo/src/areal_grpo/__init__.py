"""GRPO, PPO and related algorithms for areal, and the demonstration."""
