"""Embedded inference engine for areal on Hugging Face transformers: CPU or one GPU."""
