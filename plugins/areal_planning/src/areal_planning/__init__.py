"""What a training step takes: memory and arithmetic, from a model's config. Imports no torch."""

__version__ = "0.1.0"
