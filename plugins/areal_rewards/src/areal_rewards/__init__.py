"""Verifiers and data sets for areal."""
