"""Verifiers and data sets for areal."""

__version__ = "0.1.0"
