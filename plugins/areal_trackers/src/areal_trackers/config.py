"""Settings of the trackers. Imports no torch and none of their libraries."""

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

    folder: str = Field(default="tensorboard", min_length=1, description="where event files go, below the run folder")
    flush_every_s: Seconds = Field(default=30.0, gt=0, description="seconds after which what was logged is on disk")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("tensorboard")


class WandbSettings(Settings):
    """Settings of `wandb.WandbTracker`; who is logged in is wandb's own business (`wandb login`, WANDB_API_KEY)."""

    project: str = Field(default="areal", min_length=1, description="runs that are looked at together")
    name: str | None = Field(default=None, description="of the run; null is the name of the run folder")
    entity: str | None = Field(default=None, description="the user or team that the project belongs to")
    group: str | None = Field(default=None, description="runs that are shown as one, such as the seeds of a config")
    tags: list[str] = Field(default_factory=list, description="words to find the run by")
    mode: Literal["online", "offline", "disabled"] = Field(
        default="online", description="offline writes into the run folder; `wandb sync` sends it later"
    )
    completions_every: int = Field(default=10, ge=0, description="steps between tables of what was written; 0: none")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("wandb")


class TrackioSettings(Settings):
    """Settings of `trackio.TrackioTracker`."""

    project: str = Field(default="areal", min_length=1, description="runs that are looked at together")
    name: str | None = Field(default=None, description="of the run; null is the name of the run folder")
    group: str | None = Field(default=None, description="runs that are shown together, such as the seeds of a config")
    space_id: str | None = Field(
        default=None, description="a Hugging Face Space that shows the metrics; null keeps them on this machine"
    )
    completions_every: int = Field(default=10, ge=0, description="steps between tables of what was written; 0: none")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("trackio")


class MLflowSettings(Settings):
    """Settings of `mlflow.MLflowTracker`."""

    experiment: str = Field(default="areal", min_length=1, description="runs that are looked at together")
    name: str | None = Field(default=None, description="of the run; null is the name of the run folder")
    uri: str | None = Field(default=None, description="of the tracking server; null is what MLFLOW_TRACKING_URI says")
    completions_every: int = Field(default=10, ge=0, description="steps between tables of what was written; 0: none")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("mlflow")


class PrometheusSettings(Settings):
    """Settings of `prometheus.PrometheusTracker`."""

    host: str = Field(
        default="127.0.0.1", min_length=1, description="address of rank 0's node to serve on; 0.0.0.0 is all of them"
    )
    port: int = Field(default=9464, ge=0, le=65535, description="to serve on; 0 is a free one, told in the run folder")

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library must be there."""
        return missing_library("prometheus")
