"""The core's own components, registered through the same path as everybody else's, as plugin `core`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.plugins.markers import hookimpl
from areal_core.plugins.records import Component, HealthCheck

if TYPE_CHECKING:
    from collections.abc import Iterable


@hookimpl
def areal_workflows() -> Iterable[Component]:
    """How an episode is played."""
    return [
        Component(
            "single_turn",
            "one prompt, one answer, scored by the run's rewards",
            target="areal_core.workflows.single_turn:SingleTurn",
            config="areal_core.workflows.settings:SingleTurnSettings",
        ),
        Component(
            "multi_turn",
            "a conversation with an environment, which gives the rewards",
            target="areal_core.workflows.multi_turn:MultiTurn",
            config="areal_core.workflows.settings:MultiTurnSettings",
        ),
    ]


@hookimpl
def areal_launchers() -> Iterable[Component]:
    """How the processes of a run are started."""
    return [
        Component(
            "local",
            "all processes on this machine",
            target="areal_core.runtime.local:LocalLauncher",
            config="areal_core.runtime.settings:LocalSettings",
        ),
    ]


@hookimpl
def areal_weight_transports() -> Iterable[Component]:
    """How new weights reach the servers."""
    return [
        Component(
            "memory",
            "a folder in memory; where that is too small or servers stand on other nodes, in the run folder",
            target="areal_core.training.weight_sync:MemoryFolder",
        ),
        Component("disk", "the run folder, which all nodes see", target="areal_core.training.weight_sync:DiskFolder"),
        Component(
            "broadcast",
            "a collective broadcast from rank 0, for servers with GPUs of their own",
            target="areal_core.training.broadcast:Broadcast",
        ),
        Component(
            "ipc",
            "servers on the trainer's GPUs copy weights from its memory (CUDA IPC)",
            target="areal_core.training.ipc:CudaIpc",
        ),
    ]


@hookimpl
def areal_loss_aggregations() -> Iterable[Component]:
    """How the losses of tokens are added up."""
    module = "areal_core.algorithms.loss_aggregation"
    return [
        Component("token_mean", "every token counts the same", target=f"{module}:token_mean"),
        Component("sequence_mean", "every sequence counts the same", target=f"{module}:sequence_mean"),
        Component("episode_mean", "every episode counts the same", target=f"{module}:episode_mean"),
        Component(
            "constant_length",
            "every token counts one over a constant length",
            target=f"{module}:constant_length",
            config="areal_core.algorithms.settings:ConstantLengthSettings",
        ),
    ]


@hookimpl
def areal_algorithms() -> Iterable[Component]:
    """The bare composition, for those who choose every part themselves."""
    return [
        Component(
            "policy_gradient",
            "a policy gradient of the transforms, advantage, corrections, loss and aggregation that the config chooses",
            target="areal_core.algorithms.composition:PolicyGradient",
            config="areal_core.algorithms.settings:PolicyGradientSettings",
        ),
    ]


@hookimpl
def areal_health_checks() -> Iterable[HealthCheck]:
    """What every run needs of a machine."""
    questions = {
        "torch": "PyTorch can be imported and computes",
        "gpus": "PyTorch sees the GPUs that the machine has",
        "shared_memory": "new weights are synced through /dev/shm; where it is small, through the disk",
        "disk": "there is room for checkpoints below the current folder, and for the processes' scratch",
        "run_folder": "a run can be owned by one program: folders are renamed whole and synced",
    }
    module = "areal_core.checks.machine"
    of_a_model = {
        "model": "its type, context, quantization, and whether it needs code of its own",
        "weights": "memory of its parameters",
        "tokenizer": "there is one, and a template for chats",
    }
    about = "areal_core.checks.model_folder"
    return [
        *(HealthCheck(name, meaning, target=f"{module}:check_{name}") for name, meaning in questions.items()),
        *(
            HealthCheck(name, meaning, target=f"{about}:check_{name}", of_model=True)
            for name, meaning in of_a_model.items()
        ),
    ]
