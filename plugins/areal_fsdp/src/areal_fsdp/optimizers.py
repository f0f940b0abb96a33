"""Optimizers that a config can choose instead of the engine's own AdamW.

Each is a function of the trained parameters and the engine's settings, and returns one or more PyTorch optimizers that
together have every parameter once. Their state must exist when they are returned, so that a checkpoint can be loaded
into it. The engine sets the learning rate before each update, clips the gradients, and skips an update whose gradient
is 0 or not finite.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Shard

from areal_core.errors import RunError
from areal_fsdp.optimizer import adamw_settings, groups_of, make_optimizer
from areal_fsdp.parallel.file_names import layer_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_fsdp.config import FSDPConfig


def muon(
    parameters: Mapping[str, torch.nn.Parameter], settings: FSDPConfig, *, momentum: float = 0.95, iterations: int = 5
) -> list[torch.optim.Optimizer]:
    """Return PyTorch's Muon for the weight matrices of layers, and AdamW for all other parameters.

    Other parameters are embeddings, heads, norms, biases, and the stacked matrices of experts, which have three
    dimensions. With sharded parameters, the Newton-Schulz iteration multiplies sharded matrices: the result is that of
    one rank, up to rounding in bfloat16.

    Args:
        parameters: the trained parameters by name, float32, plain or sharded (DTensor).
        settings: the engine's settings.
        momentum, iterations: see `MuonSettings`.

    Example:
        >>> import torch
        >>> from areal_fsdp.config import FSDPConfig
        >>> parameters = {
        ...     "model.layers.0.mlp.up_proj.weight": torch.nn.Parameter(torch.ones(4, 2)),
        ...     "model.layers.0.input_layernorm.weight": torch.nn.Parameter(torch.ones(2)),
        ... }
        >>> [type(optimizer).__name__ for optimizer in muon(parameters, FSDPConfig(learning_rate=1e-3))]
        ['Muon', 'AdamW']
    """
    # Mamba's A_log has two dimensions too, but nothing is multiplied with it as a matrix.
    hidden = {
        name: p for name, p in parameters.items() if p.dim() == 2 and name.endswith("weight") and layer_of(name) != name
    }
    others = [p for name, p in parameters.items() if name not in hidden]
    optimizers: list[torch.optim.Optimizer] = []
    if hidden:
        first = torch.optim.Muon(
            hidden.values(),
            lr=_rate(settings),
            weight_decay=settings.weight_decay,
            momentum=momentum,
            ns_steps=iterations,
            adjust_lr_fn="match_rms_adamw",
        )
        for parameter in hidden.values():
            first.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        optimizers.append(first)
    if others:
        optimizers.append(make_optimizer(others, settings))
    return optimizers


def adamw_8bit(parameters: Mapping[str, torch.nn.Parameter], settings: FSDPConfig) -> list[torch.optim.Optimizer]:
    """Return torchao's AdamW with moments of 8 bits; see `AdamW8bitSettings`.

    torchao compiles the update for each shape of a parameter, which takes a GPU's or a C++ compiler. bitsandbytes is no
    alternative, because its kernels take no sharded parameters.

    Args:
        parameters: the trained parameters by name, float32, plain or sharded (DTensor).
        settings: the engine's settings.

    Raises:
        RunError: torchao is not installed, or ranks have parts of different sizes of a parameter.
    """
    try:
        torchao: Any = importlib.import_module("torchao.optim")
    except ImportError as error:
        raise RunError(
            f"the optimizer fsdp/adamw_8bit needs torchao, which cannot be imported: {error}",
            hints=["pip install 'areal-fsdp[torchao]'", "or set train_engine.optimizer_state_dtype=bfloat16 instead"],
        ) from error
    for name, parameter in parameters.items():
        if isinstance(parameter, DTensor) and not _is_even(parameter):
            raise RunError(
                f"the optimizer fsdp/adamw_8bit needs parts of equal size on all ranks, but '{name}' of shape "
                f"{tuple(parameter.shape)} cannot be divided evenly",
                hints=["use another number of ranks, or train_engine.optimizer_state_dtype=bfloat16"],
            )
    optimizer = torchao.AdamW8bit(groups_of(list(parameters.values()), settings), **adamw_settings(settings))
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            "exp_avg": optimizer._new_buffer(parameter, True),
            "exp_avg_sq": optimizer._new_buffer(parameter, False),
        }
    return [optimizer]


def _is_even(tensor: DTensor) -> bool:
    """Return whether all ranks have parts of the same shape."""
    return all(
        not isinstance(placement, Shard) or tensor.shape[placement.dim] % tensor.device_mesh.size(dimension) == 0
        for dimension, placement in enumerate(tensor.placements)
    )


def _rate(settings: FSDPConfig) -> float:
    assert settings.learning_rate is not None  # the engine has set the algorithm's default
    return settings.learning_rate
