"""DeepSpeed as this engine uses it: ZeRO with PyTorch's AdamW, and nothing that has to be compiled."""

from __future__ import annotations

import os
import warnings
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import ValidationError

from areal_core.errors import RunError
from areal_fsdp.optimizer import adamw_settings, groups_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_deepspeed.config import DeepSpeedConfig


@cache
def deepspeed() -> Any:
    """Return the library. It is imported late, because the import inspects the machine.

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
    # On a CPU DeepSpeed would compile its own collectives, which needs a compiler and minutes. A process that is killed
    # during this leaves a lock behind, and all later ones wait for it. Gloo is available anyway.
    operations["deepspeed_shm_comm"] = False
    return library


def initialize(module: torch.nn.Module, config: dict[str, Any], settings: DeepSpeedConfig, *, trains: bool) -> Any:
    """Return DeepSpeed's engine around a module; collective. PyTorch's fused AdamW trains it: it needs no compiler.

    Args:
        module: the model in its role.
        config: complete config for DeepSpeed.
        settings: settings of the optimizer.
        trains: whether the module is trained.

    Raises:
        RunError: DeepSpeed refuses the config.
    """
    optimizer = None
    if trains:
        groups = groups_of(list(module.parameters()), settings)
        optimizer = torch.optim.AdamW(groups, **adamw_settings(settings), fused=True)
    library = deepspeed()
    try:
        engine, _, _, _ = library.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, library.DeepSpeedConfigError) as error:
        source = f"'{settings.config}'" if isinstance(settings.config, Path) else "in train_engine.config"
        raise RunError(
            f"DeepSpeed refuses the config {source}: {_describe(error)}",
            hints=["correct the key that it names, or remove it"],
        ) from error
    if optimizer is not None:
        optimizer.register_step_pre_hook(_still_without_gradient(engine.optimizer))
    return engine


def _describe(error: Exception) -> str:
    """Return DeepSpeed's message about a config."""
    if isinstance(error, ValidationError):
        problems = [
            f"{'.'.join(map(str, detail['loc']))}: {detail['input']!r:.60}: {detail['msg']}"
            for detail in error.errors()
        ]
        return "; ".join(problems)
    return str(error).strip() or type(error).__name__


def _still_without_gradient(zero: Any) -> Callable[..., None]:
    """Return a hook that skips a step whose gradient is 0, because momentum would still move the parameters.

    It sets `found_inf`, with which the fused kernel does nothing.
    """

    def hook(optimizer: Any, *_: object) -> None:
        norm = torch.as_tensor(zero._global_grad_norm)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.found_inf = (norm == 0).to(device, torch.float32)

    return hook
