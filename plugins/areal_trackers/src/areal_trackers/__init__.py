"""TensorBoard, wandb, trackio and Prometheus for areal."""

__version__ = "0.1.0"
