"""Verifiers, judges, reward models and data sets for areal."""
