"""Trackers for areal: TensorBoard, Weights & Biases, Trackio, MLflow and Prometheus."""
