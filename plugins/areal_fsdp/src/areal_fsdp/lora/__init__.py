"""LoRA adapters through PEFT, for areal's training engines."""
