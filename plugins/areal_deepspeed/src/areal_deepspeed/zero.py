"""DeepSpeed as this engine uses it: ZeRO around a module, with PyTorch's AdamW and nothing that must be compiled."""

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


def initialize(module: torch.nn.Module, config: dict[str, Any], settings: DeepSpeedConfig, *, trains: bool) -> Any:
    """DeepSpeed's engine around a module; collective. PyTorch's fused AdamW trains it, for it is there everywhere.

    Args:
        module: the model in its role.
        config: what DeepSpeed is given.
        settings: of the optimizer.
        trains: whether there is one.

    Raises:
        RunError: DeepSpeed does not take the config.
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
            f"DeepSpeed does not take the config {source}: {_words(error)}",
            hints=["correct the key that it names, or leave it out"],
        ) from error
    if optimizer is not None:
        optimizer.register_step_pre_hook(_still_without_gradient(engine.optimizer))
    return engine


def _words(error: Exception) -> str:
    """What DeepSpeed says of a config."""
    if isinstance(error, ValidationError):
        found = [f"{'.'.join(map(str, each['loc']))}: {each['input']!r:.60}: {each['msg']}" for each in error.errors()]
        return "; ".join(found)
    return str(error).strip() or type(error).__name__


def _still_without_gradient(zero: Any) -> Callable[..., None]:
    """A hook that keeps momentum from moving parameters where no token counts: the fused kernel then does nothing."""

    def hook(optimizer: Any, *_: object) -> None:
        norm = torch.as_tensor(zero._global_grad_norm)
        device = next(p.device for group in optimizer.param_groups for p in group["params"])
        optimizer.found_inf = (norm == 0).to(device, torch.float32)

    return hook
