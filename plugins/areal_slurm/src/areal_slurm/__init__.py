"""Runs of areal on SLURM: the launcher within an allocation, and the batch jobs that hold one."""
