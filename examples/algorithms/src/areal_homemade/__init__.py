"""Algorithms that need more than a loss, each in one short file."""
