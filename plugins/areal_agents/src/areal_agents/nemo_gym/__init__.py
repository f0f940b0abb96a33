"""Environments of NeMo Gym (version 0.4), each a resources server in an interpreter of its own."""
