"""TensorBoard, wandb, trackio and Prometheus for areal."""
