"""Runs on machines that another program starts: torchrun, MPI, Kubernetes, or a shell on each machine."""
