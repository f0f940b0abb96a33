"""Algorithms as compositions: what a plugin that publishes an algorithm, or a part of one, builds on.

`settings` holds the config models (no torch), `composition` policy gradients, `supervised` fine-tuning.
"""
