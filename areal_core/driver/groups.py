"""The process groups of a run: its config alone says which processes there are."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from areal_core.config.launching import launching
from areal_core.interfaces.launcher import OnExit, ProcessGroup
from areal_core.runtime.member import INTERFACE_VARIABLES
from areal_core.runtime.roles import role_group

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.config import RunConfig


def model_group(run_dir: Path) -> ProcessGroup:
    """Return the group of the process that makes or fetches the model, before anything else starts."""
    command = [sys.executable, "-m", "areal_core.driver.model_initialization", str(run_dir)]
    return ProcessGroup("model", "model_initialization", command)


def process_groups(config: RunConfig, run_dir: Path) -> list[ProcessGroup]:
    """Return all groups of a run that trains, in the order in which they are placed.

    Args:
        config: config of the run.
        run_dir: the run folder.

    Example:
        >>> from pathlib import Path
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import process_groups
        >>> config = resolve("grpo/addition").config
        >>> [group.name for group in process_groups(config, Path("runs/addition"))]
        ['trainer', 'controller', 'worker-0', 'server-0']
    """
    settings = launching(config.launcher)
    interface = settings.network_interface
    trainer = role_group(
        "trainer",
        "trainer",
        run_dir,
        count=config.trainer_processes,
        gpus_each=1 if config.placement.training else 0,
        gpus=None if config.placement.is_counted else _numbers(config.placement.training),
        cores_each=settings.threads_per_process,
        environment=dict.fromkeys(INTERFACE_VARIABLES, interface) if interface else {},
    )
    if config.inference_engine is None:
        return [trainer]
    controller = role_group("controller", "controller", run_dir, beside="trainer")
    return [trainer, controller, *rollout_groups(config, run_dir, "controller")]


def rollout_groups(config: RunConfig, run_dir: Path, beside: str) -> list[ProcessGroup]:
    """Return the process groups of rollout workers and inference servers.

    Args:
        config: config of the run. It has an inference engine.
        run_dir: the run folder.
        beside: name of the group whose node the rollout workers share.

    Example:
        >>> from pathlib import Path
        >>> from areal_core.config import resolve
        >>> from areal_core.programs import rollout_groups
        >>> config = resolve("grpo/addition", overrides=["rollout.workers=2"]).config
        >>> [group.name for group in rollout_groups(config, Path("runs/addition"), beside="evaluator")]
        ['worker-0', 'worker-1', 'server-0']
    """
    assert config.inference_engine is not None
    workers = [
        role_group(f"worker-{number}", "rollout_worker", run_dir, beside=beside, on_exit=OnExit.RESTART)
        for number in range(config.rollout.workers)
    ]
    server_groups = getattr(config.inference_engine.settings, "process_groups", None)
    return workers if server_groups is None else [*workers, *server_groups(config, run_dir)]


def split_optional(config: RunConfig, groups: Sequence[ProcessGroup]) -> tuple[list[ProcessGroup], list[ProcessGroup]]:
    """Split groups into those that must have room and those that start as soon as there is room.

    Servers beyond the configured minimum are optional. Servers that others start (`addresses`) count towards it.
    """
    if not config.has_elastic_servers:
        return list(groups), []
    assert config.inference_engine is not None
    settings = config.inference_engine.keywords()
    minimum = max(0, settings["servers"].minimum - len(settings.get("addresses", ())))
    optional = [group for group in groups if group.is_server][minimum:]
    return [group for group in groups if group not in optional], optional


def _numbers(gpus: Sequence[int] | None) -> tuple[int, ...] | None:
    return None if gpus is None else tuple(gpus)
