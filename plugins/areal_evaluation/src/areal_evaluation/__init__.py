"""Evaluation of a model without training it: `areal eval`."""

__version__ = "0.1.0"
