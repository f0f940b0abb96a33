"""Generation on SGLang servers for areal."""

__version__ = "0.1.0"
