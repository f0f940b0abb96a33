"""Training engine for areal: FSDP2 over Hugging Face models."""
