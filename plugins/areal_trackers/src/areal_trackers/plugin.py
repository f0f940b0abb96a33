"""Components of this plugin: trackers, each with its own library. Imports nothing heavy."""

from __future__ import annotations

from areal_core.plugins import Component, hookimpl


@hookimpl
def areal_trackers() -> list[Component]:
    """Trackers that log metrics in addition to the run folder."""
    return [
        Component(
            "tensorboard",
            "event files for TensorBoard in the run folder",
            target="areal_trackers.tensorboard:TensorBoardTracker",
            config="areal_trackers.config:TensorBoardSettings",
        ),
        Component(
            "wandb",
            "Weights & Biases",
            target="areal_trackers.wandb:WandbTracker",
            config="areal_trackers.config:WandbSettings",
        ),
        Component(
            "trackio",
            "Trackio, a dashboard on this machine or in a Hugging Face Space",
            target="areal_trackers.trackio:TrackioTracker",
            config="areal_trackers.config:TrackioSettings",
        ),
        Component(
            "mlflow",
            "an MLflow tracking server",
            target="areal_trackers.mlflow:MLflowTracker",
            config="areal_trackers.config:MLflowSettings",
        ),
        Component(
            "prometheus",
            "serves the metrics of a running run to Prometheus",
            target="areal_trackers.prometheus:PrometheusTracker",
            config="areal_trackers.config:PrometheusSettings",
        ),
    ]
