"""Settings of the Ray launcher. Imports neither Ray nor torch."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from areal_core.config import LauncherSettings, Seconds
from areal_core.plugins import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig

INSTALL = install_command("ray", extra="ray")


class RaySettings(LauncherSettings):
    """Processes on a Ray cluster: one placement group with a bundle for each rank and server that has GPUs."""

    nodes: int | None = Field(None, ge=1)
    """machines over which the run is spread in equal parts; null: its GPUs are where Ray finds them, and a run without
    GPUs is on one machine"""
    resources: dict[str, float] = Field(default={})
    """of Ray, that are booked with each bundle: one CPU where nothing is said; nothing holds the run to them"""
    labels: dict[str, str] = Field(default={})
    """Ray's label selectors that each node must match, such as `{region: "in(eu,us)"}`"""
    excluded_nodes: list[str] = Field(default=[])
    """nodes that the run must not use, by Ray's name of them, host or address"""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"] = "PACK"
    """Ray's placement of GPUs where `nodes` is null: on few machines, on many, or on one"""
    address: str | None = "auto"
    """of the cluster, HOST:PORT; auto: the one that this machine belongs to; null: one of this machine alone, which
    begins and ends with the run"""
    host: str | None = None
    """this machine's address in the cluster, on which the driver listens; null: what Ray says"""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the run's processes, such as `{env_vars: {NCCL_DEBUG: INFO}}`"""
    pass_environment: list[str] = Field(default=["AREAL_*", "HF_*", "NCCL_*", "TORCH_*", "WANDB_*", "PYTHONPATH"])
    """variables of this program's environment that nodes are given as well, by name or pattern"""
    placement_timeout_s: Seconds = Field(120.0, gt=0)
    """seconds that the cluster has to make room; more where machines are started when they are asked for"""

    def passed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables of an environment that nodes are given."""
        names = [name for name in environment if any(fnmatchcase(name, one) for one in self.pass_environment)]
        return {name: environment[name] for name in names}

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library is there, and what is asked for can be at all."""
        if importlib.util.find_spec("ray") is None:
            yield f"the launcher ray needs the library ray, which is not installed: {INSTALL}"
        if self.address is None and (self.nodes or 1) > 1:
            yield "a cluster of this machine alone (launcher.address: null) has one machine: leave launcher.nodes out"
        if "://" in (self.address or ""):
            yield f"{self.address} is not an address: write HOST:PORT, auto or null, on a node of the cluster"
        yield from super().check(config)
