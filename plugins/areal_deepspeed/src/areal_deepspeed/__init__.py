"""Training engine for areal: DeepSpeed's ZeRO 2 and 3 over Hugging Face models."""
