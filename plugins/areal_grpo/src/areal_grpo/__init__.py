"""GRPO, PPO and their relatives for areal, and the demonstration."""
