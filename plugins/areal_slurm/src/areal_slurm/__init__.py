"""Runs of areal on SLURM: a launcher for the nodes of an allocation, and batch jobs that requeue themselves."""
