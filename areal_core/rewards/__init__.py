"""Rewards: calling reward functions (`scoring`), in worker processes (`worker`, `child`) of a pool (`pool`)."""
