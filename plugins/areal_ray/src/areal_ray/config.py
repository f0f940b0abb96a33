"""Settings of the Ray launcher. This module imports neither Ray nor torch."""

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
    """Settings of the Ray launcher: a placement group with a bundle for each rank and each server that has GPUs."""

    nodes: int | None = Field(None, ge=1)
    """Number of machines that the run is spread over in equal parts. null: Ray decides where the GPUs are, and a run
    without GPUs is on one machine."""
    resources: dict[str, float] = Field(default={})
    """Ray resources that are reserved for each bundle; by default one CPU. Ray does not limit the processes to them."""
    labels: dict[str, str] = Field(default={})
    """Ray label selectors that each node must match, such as `{region: "in(eu,us)"}`."""
    excluded_nodes: list[str] = Field(default=[])
    """Nodes that the run must not use, by Ray's node name, host name or address."""
    strategy: Literal["PACK", "SPREAD", "STRICT_PACK"] = "PACK"
    """Placement of GPUs if `nodes` is null. `PACK`: on few machines. `SPREAD`: on many. `STRICT_PACK`: on one."""
    address: str | None = "auto"
    """Address of the Ray cluster, HOST:PORT. `auto`: the cluster that this machine belongs to. null: a Ray of this
    machine alone, which starts and ends with the run."""
    host: str | None = None
    """Address of this machine in the cluster, on which the driver listens. null: the address that Ray reports."""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray runtime environment of the run's processes, such as `{env_vars: {NCCL_DEBUG: INFO}}`."""
    pass_environment: list[str] = Field(default=["AREAL_*", "HF_*", "NCCL_*", "TORCH_*", "WANDB_*", "PYTHONPATH"])
    """Environment variables of the driver that are passed on to nodes, by name or pattern."""
    placement_timeout_s: Seconds = Field(120.0, gt=0)
    """Seconds to wait until the cluster has room for the run. Raise it if machines are started on demand."""

    def passed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of an environment that nodes get."""
        names = [name for name in environment if any(fnmatchcase(name, pattern) for pattern in self.pass_environment)]
        return {name: environment[name] for name in names}

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that Ray is installed and that the settings are consistent."""
        if importlib.util.find_spec("ray") is None:
            yield f"the launcher ray needs the library ray, which is not installed: {INSTALL}"
        if self.address is None and (self.nodes or 1) > 1:
            yield "a cluster of this machine only (launcher.address: null) has one machine: remove launcher.nodes"
        if "://" in (self.address or ""):
            yield f"{self.address} is not an address: write HOST:PORT, auto or null, on a node of the cluster"
        yield from super().check(config)
