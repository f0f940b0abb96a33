"""Demonstration for a laptop: a small language model learns to show its working before it answers."""
