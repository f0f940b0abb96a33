"""The outcome of every prompt group: the store, which only the rollout controller opens, and its audit."""
