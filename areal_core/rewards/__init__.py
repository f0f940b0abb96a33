"""Rewards: calling reward functions, the processes in which they run, and the pool of these."""
