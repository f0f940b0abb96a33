"""What a training step takes: memory and arithmetic, from a model's config; and who does it."""
