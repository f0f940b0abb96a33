"""DeepSpeed as this engine uses it: ZeRO around a module, with PyTorch's AdamW and nothing that must be compiled."""

from __future__ import annotations

import os
import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


@cache
def deepspeed() -> Any:
    """The library; imported late, because it looks at the machine when it is.

    Raises:
        RunError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # its collectives
    try:
        import deepspeed as library
        from deepspeed.ops import __compatible_ops__ as operations
    except ImportError as error:
        raise RunError(
            f"the train engine deepspeed/deepspeed needs DeepSpeed, which cannot be imported: {error}",
            hints=["DS_BUILD_OPS=0 pip install --no-build-isolation deepspeed"],
        ) from error
    # On a CPU it would compile collectives of its own when it starts: for that it needs a compiler and minutes, and a
    # process that is killed meanwhile leaves a lock behind, which all later ones wait for. Gloo is there anyway.
    operations["deepspeed_shm_comm"] = False
    return library


def make_optimizer(parameters: Iterable[torch.nn.Parameter], decay: float, settings: dict[str, Any]) -> Any:
    """PyTorch's fused AdamW, with weight decay for matrices alone."""
    some = list(parameters)
    groups = [
        {"params": [p for p in some if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in some if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **settings, fused=True)


def initialize(module: torch.nn.Module, config: dict[str, Any], optimizer: torch.optim.Optimizer | None) -> Any:
    """DeepSpeed's engine around a module; collective.

    Raises:
        RunError: DeepSpeed does not take the config.
    """
    try:
        engine, _, _, _ = deepspeed().initialize(
            model=module, optimizer=optimizer, config=config, dist_init_required=False
        )
    except (AssertionError, ValueError, TypeError, KeyError) as error:  # whatever it says of a config
        raise RunError(
            f"DeepSpeed does not take the config: {str(error).strip() or type(error).__name__}",
            hints=["correct the JSON in train_engine.config"],
        ) from error
    if optimizer is not None:
        optimizer.register_step_pre_hook(_still_without_gradient(engine.optimizer))
    return engine


def _still_without_gradient(zero: Any) -> Callable[..., None]:
    """A hook that keeps momentum from moving parameters where no token counts: the fused kernel then does nothing."""

    def hook(optimizer: Any, *_: object) -> None:
        norm = torch.as_tensor(zero._global_grad_norm)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.found_inf = (norm == 0).to(device, torch.float32)

    return hook
