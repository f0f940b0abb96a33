"""Training engine for areal: FSDP2 over Hugging Face models."""

__version__ = "0.1.0"
