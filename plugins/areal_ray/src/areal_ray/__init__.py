"""Launcher that runs areal on a Ray cluster, and a command that submits a run as a Ray job."""
