"""Generation on vLLM servers for areal."""

__version__ = "0.1.0"
