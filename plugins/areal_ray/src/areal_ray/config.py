"""Settings of the Ray launcher. Imports neither Ray nor torch."""

from __future__ import annotations

import importlib.util
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field

from areal_core.config import LauncherSettings, Seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from areal_core.config import RunConfig

INSTALL = "pip install 'areal-ray[ray]'"


class RaySettings(LauncherSettings):
    """Nodes of a Ray cluster: one bundle of a placement group for each node of the run."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    nodes: int = Field(1, ge=1)
    """nodes of the run"""
    maximum_nodes: int = Field(0, ge=0)
    """more nodes that the run takes when the cluster has them, up to so many in all, and asks the cluster's autoscaler
    for: used by servers that come and go (inference_engine.servers: {minimum, maximum}); 0 for none"""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs that the run has on each node; those are counted through all nodes, and placement names them"""
    cpus_per_node: float = Field(1.0, gt=0)
    """CPUs that Ray books for the run on each node; nothing holds the run to them"""
    resources: dict[str, float] = Field(default={})
    """Ray's custom resources that each node must have, such as `{H200: 8}`"""
    labels: dict[str, str] = Field(default={})
    """Ray's label selectors that each node must match, such as `{region: "in(eu,us)"}`"""
    excluded_nodes: list[str] = Field(default=[])
    """nodes that the run must not use, by Ray's name of them, host or address"""
    strategy: Literal["STRICT_SPREAD", "SPREAD", "PACK"] = "STRICT_SPREAD"
    """Ray's placement: STRICT_SPREAD takes as many machines as there are nodes; the others may put several on one"""
    address: str | None = "auto"
    """of the cluster, HOST:PORT; auto: the one that this machine belongs to; null: one of this machine alone, which
    begins and ends with the run"""
    host: str | None = None
    """this machine's address in the cluster, on which this program listens for the nodes; null: what Ray says"""
    runtime_env: dict[str, Any] = Field(default={})
    """Ray's runtime environment of the nodes' programs, such as `{env_vars: {NCCL_DEBUG: INFO}}`"""
    pass_environment: list[str] = Field(default=["AREAL_*", "HF_*", "NCCL_*", "TORCH_*", "WANDB_*", "PYTHONPATH"])
    """variables of this program's environment that nodes are given as well, by name or pattern"""
    placement_timeout_s: Seconds = Field(120.0, gt=0)
    """seconds that the cluster has to make room; more where machines are started when they are asked for"""

    def passed(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables of an environment that nodes are given."""
        return {
            name: value
            for name, value in environment.items()
            if any(fnmatchcase(name, pattern) for pattern in self.pass_environment)
        }

    def check(self, config: RunConfig) -> Iterable[str]:
        """The library is there, and what is asked for can be at all."""
        if importlib.util.find_spec("ray") is None:
            yield f"the launcher ray needs the library ray, which is not installed: {INSTALL}"
        if self.address is None and self.nodes > 1 and self.strategy == "STRICT_SPREAD":
            yield "a cluster of this machine alone (address: null) has one machine: use nodes: 1 or strategy: PACK"
        if self.address is not None and "://" in self.address:
            yield f"{self.address} is no address: write HOST:PORT, auto or null, on a node of the cluster"
        training, generation = config.placement.training or [], config.placement.generation or []
        yield from super().check(config)
        there = self.nodes * self.gpus_per_node
        if (highest := max((*training, *generation), default=-1)) >= there:
            yield (
                f"placement names GPU {highest}, and {self.nodes} nodes with {self.gpus_per_node} GPUs each have "
                f"{there}, counted from 0: raise launcher.gpus_per_node or launcher.nodes"
            )
