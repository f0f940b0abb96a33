"""The launcher that comes with the core: all processes of a run on this machine."""
