"""The core's own components. They are registered like those of any plugin, under the plugin name `core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import hookimpl
from areal_core.plugins.records import Component, HealthCheck

if TYPE_CHECKING:
    from collections.abc import Iterable

_NO_SETTINGS = "areal_core.config.settings:NoSettings"


@hookimpl
def areal_workflows() -> Iterable[Component]:
    """Supply the two ways to run an episode without a plugin."""
    return [
        Component(
            "single_turn",
            "one prompt and one answer, scored by the run's reward functions",
            target="areal_core.workflows.single_turn:SingleTurn",
            config="areal_core.workflows.settings:SingleTurnSettings",
        ),
        Component(
            "multi_turn",
            "a conversation with an environment, which supplies the rewards",
            target="areal_core.workflows.multi_turn:MultiTurn",
            config="areal_core.workflows.settings:MultiTurnSettings",
        ),
    ]


@hookimpl
def areal_launchers() -> Iterable[Component]:
    """Supply the launcher for one machine."""
    return [
        Component(
            "local",
            "runs all processes on this machine",
            target="areal_core.runtime.local:LocalLauncher",
            config="areal_core.runtime.settings:LocalSettings",
        ),
    ]


@hookimpl
def areal_weight_transports() -> Iterable[Component]:
    """Supply the ways in which new weights reach the servers."""
    return [
        Component(
            "memory",
            "weights in a folder in memory, or in the run folder if memory is too small or servers are on other nodes",
            target="areal_core.training.weight_sync:MemoryFolder",
            config=_NO_SETTINGS,
        ),
        Component(
            "disk",
            "weights in the run folder, which all nodes must share",
            target="areal_core.training.weight_sync:DiskFolder",
            config=_NO_SETTINGS,
        ),
        Component(
            "broadcast",
            "a collective broadcast from rank 0, for servers with their own GPUs",
            target="areal_core.training.broadcast:Broadcast",
            config=_NO_SETTINGS,
        ),
        Component(
            "ipc",
            "servers on the trainer's GPUs copy the weights from GPU memory (CUDA IPC)",
            target="areal_core.training.ipc:CudaIpc",
            config=_NO_SETTINGS,
        ),
    ]


@hookimpl
def areal_loss_aggregations() -> Iterable[Component]:
    """Supply the ways to add up the losses of tokens."""
    module = "areal_core.algorithms.loss_aggregation"
    return [
        *(
            Component(f"{one}_mean", f"every {one} counts the same", target=f"{module}:{one}_mean", config=_NO_SETTINGS)
            for one in ("token", "sequence", "episode")
        ),
        Component(
            "constant_length",
            "divides the loss of every token by a constant length",
            target=f"{module}:constant_length",
            config="areal_core.algorithms.settings:ConstantLengthSettings",
        ),
    ]


@hookimpl
def areal_algorithms() -> Iterable[Component]:
    """Supply the composition without defaults, for configs that choose every part."""
    return [
        Component(
            "policy_gradient",
            "a policy gradient whose transforms, advantage, corrections, loss and aggregation the config chooses",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_core.algorithms.settings:PolicyGradientSettings",
        ),
    ]


@hookimpl
def areal_health_checks() -> Iterable[HealthCheck]:
    """Supply the checks of what every run needs of a machine, and every model."""
    machine_checks = {
        "torch": "PyTorch can be imported and computes",
        "gpus": "PyTorch sees the GPUs that the machine has",
        "shared_memory": "weights are synced through /dev/shm, or through the disk if it is small",
        "disk": "there is room for checkpoints below the current folder, and for the processes' scratch files",
        "run_folder": "one program can own a run: the file system renames folders atomically and syncs them",
    }
    module = "areal_core.checks.machine"
    model_checks = {
        "model": "type, context and quantization, and whether it needs its own code",
        "weights": "memory of the parameters",
        "tokenizer": "there is a tokenizer and a chat template",
    }
    model_module = "areal_core.checks.model_folder"
    return [
        *(HealthCheck(name, summary, target=f"{module}:check_{name}") for name, summary in machine_checks.items()),
        *(
            HealthCheck(name, summary, target=f"{model_module}:check_{name}", of_model=True)
            for name, summary in model_checks.items()
        ),
    ]
