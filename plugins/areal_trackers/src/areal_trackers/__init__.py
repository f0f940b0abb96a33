"""TensorBoard, wandb and trackio for areal."""

__version__ = "0.1.0"
