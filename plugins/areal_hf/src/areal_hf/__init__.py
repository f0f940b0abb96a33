"""Embedded inference engine for areal on Hugging Face transformers: CPU or one GPU."""

__version__ = "0.1.0"
