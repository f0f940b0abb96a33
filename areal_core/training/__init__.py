"""The synchronous half of a run: the loop, weight sync, checkpoints. Every rank of the trainer runs it (SPMD).

It knows nothing about inference servers: rank 0 asks the rollout controller for batches and hands it folders of
weights.
"""
