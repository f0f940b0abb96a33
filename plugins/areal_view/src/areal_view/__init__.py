"""Pages of a run: curves, rollouts token by token, a timeline."""
