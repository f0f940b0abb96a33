"""Settings of the trackers. This module imports neither torch nor the trackers' libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from areal_core.config import Seconds, Settings
from areal_trackers.libraries import missing_library

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig


class TensorBoardSettings(Settings):
    """Settings of `tensorboard.TensorBoardTracker`."""

    folder: str = Field(
        default="tensorboard", min_length=1, description="Folder for the event files, relative to the run folder."
    )
    flush_every_s: Seconds = Field(
        default=30.0, gt=0, description="Maximum number of seconds until logged values are written to disk."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("tensorboard")


class WandbSettings(Settings):
    """Settings of `wandb.WandbTracker`. wandb itself handles the login (`wandb login`, WANDB_API_KEY)."""

    project: str = Field(default="areal", min_length=1, description="Project in which Weights & Biases shows the run.")
    name: str | None = Field(default=None, description="Name of the run. null: the name of the run folder.")
    entity: str | None = Field(
        default=None, description="User or team that the project belongs to. null: your default entity."
    )
    group: str | None = Field(
        default=None, description="Group of runs that are shown together, such as the seeds of a config. null: none."
    )
    tags: list[str] = Field(default_factory=list, description="Tags to find the run by.")
    mode: Literal["online", "offline", "disabled"] = Field(
        default="online",
        description="`online`: upload during the run. `offline`: write to the run folder, from which `wandb sync` "
        "uploads later. `disabled`: log nothing.",
    )
    completions_every: int = Field(
        default=10, ge=0, description="Training steps between tables of sampled answers. 0: no tables."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("wandb")


class TrackioSettings(Settings):
    """Settings of `trackio.TrackioTracker`."""

    project: str = Field(default="areal", min_length=1, description="Project in which Trackio shows the run.")
    name: str | None = Field(default=None, description="Name of the run. null: the name of the run folder.")
    group: str | None = Field(
        default=None, description="Group of runs that are shown together, such as the seeds of a config. null: none."
    )
    space_id: str | None = Field(
        default=None, description="Hugging Face Space that shows the metrics. null: keep them on this machine."
    )
    completions_every: int = Field(
        default=10, ge=0, description="Training steps between tables of sampled answers. 0: no tables."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("trackio")


class MLflowSettings(Settings):
    """Settings of `mlflow.MLflowTracker`."""

    experiment: str = Field(default="areal", min_length=1, description="Experiment in which MLflow shows the run.")
    name: str | None = Field(default=None, description="Name of the run. null: the name of the run folder.")
    uri: str | None = Field(
        default=None, description="Address of the tracking server. null: the value of MLFLOW_TRACKING_URI."
    )
    completions_every: int = Field(
        default=10, ge=0, description="Training steps between tables of sampled answers. 0: no tables."
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("mlflow")


class PrometheusSettings(Settings):
    """Settings of `prometheus.PrometheusTracker`."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on rank 0's node on which metrics are served. 0.0.0.0: all addresses.",
    )
    port: int = Field(
        default=9464,
        ge=0,
        le=65535,
        description="Port on which metrics are served. 0: a free port, which is written to the run folder.",
    )

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the library is installed."""
        return missing_library("prometheus")
