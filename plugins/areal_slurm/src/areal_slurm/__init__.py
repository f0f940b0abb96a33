"""Runs of areal on SLURM: the launcher within an allocation, and the batch jobs that hold one."""

__version__ = "0.1.0"
