"""Pages of a run: curves, rollouts token by token, a timeline; and diagnostics while it goes on."""
