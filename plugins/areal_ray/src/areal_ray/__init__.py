"""Runs of areal on a Ray cluster."""
