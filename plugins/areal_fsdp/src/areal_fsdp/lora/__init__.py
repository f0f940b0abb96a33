"""LoRA adapters through PEFT, for areal's training engines."""

__version__ = "0.1.0"
