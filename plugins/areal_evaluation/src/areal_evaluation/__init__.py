"""Evaluation of a model without training it: `areal eval`."""
