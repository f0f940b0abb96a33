"""Attention over packed sequences for training engines: one interface, and the fastest kernel that is installed."""
