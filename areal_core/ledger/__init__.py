"""What became of every prompt: the store that the rollout controller alone opens, and the audit of it."""
