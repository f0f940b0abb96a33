"""Estimate a training step's memory and FLOPs from a model's config, and split batches over ranks."""
