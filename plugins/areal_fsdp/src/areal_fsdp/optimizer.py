"""Optimizers and their step with gradient clipping, for plain and sharded parameters."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from areal_core.errors import RunError
from areal_fsdp.models.compiling import compiled
from areal_fsdp.parallel.adamw import update
from areal_fsdp.parallel.moments import PiecewiseAdamW
from areal_fsdp.parallel.tensor import own_part

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from areal_fsdp.config import FSDPConfig
    from areal_fsdp.masters import Masters
    from areal_fsdp.models.schedule import LearningSettings


def make_optimizers(
    parameters: Mapping[str, torch.nn.Parameter], config: FSDPConfig, *, is_compiled: bool = False
) -> list[torch.optim.Optimizer]:
    """Return the optimizers of the setting `optimizer`, or the engine's own AdamW; see `areal_fsdp.optimizers`.

    Raises:
        RunError: the optimizers of a component do not have every parameter once.
    """
    if config.optimizer is None:
        return [make_optimizer(parameters.values(), config, is_compiled=is_compiled)]
    optimizers = list(config.optimizer.build()(parameters, config))
    taken = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    if len(taken) != len(parameters) or {*map(id, taken)} != {*map(id, parameters.values())}:
        raise RunError(
            f"{config.optimizer.title} returned optimizers of {len(taken)} parameters, but the role trains "
            f"{len(parameters)}: they must have each parameter once"
        )
    return optimizers


def make_optimizer(
    parameters: Iterable[torch.nn.Parameter], config: FSDPConfig, *, is_compiled: bool = False
) -> torch.optim.AdamW:
    """Return an AdamW with initialized state: PyTorch's fused one, unless moments are in bfloat16 or host memory.

    The state is made here and not in the first step, so that a checkpoint always has the same tensors and memory does
    not grow after the first batch.
    """
    parameters = list(parameters)
    groups = [group for on_mesh in _by_mesh(parameters).values() for group in groups_of(on_mesh, config)]
    settings = adamw_settings(config)
    on_gpu = parameters[0].device.type == "cuda"
    to_host = {"device": "cpu", "pin_memory": True} if config.offload_optimizer and on_gpu else {}
    moments: Any = {"dtype": getattr(torch, config.optimizer_state_dtype), "requires_grad": False, **to_host}
    is_plain = config.optimizer_state_dtype == "float32" and not to_host
    optimizer = (
        torch.optim.AdamW(groups, **settings, fused=True)
        if is_plain
        else PiecewiseAdamW(groups, **settings, update=_compiled_update() if is_compiled else update)
    )
    for parameter in parameters:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, **moments),
            "exp_avg_sq": torch.zeros_like(parameter, **moments),
        }
    return optimizer


def groups_of(parameters: Sequence[torch.Tensor], settings: LearningSettings) -> list[dict[str, Any]]:
    """Return parameter groups for an optimizer, with weight decay only for matrices."""
    matrices, others = ([p for p in parameters if (p.dim() > 1) is decays] for decays in (True, False))
    groups = {"params": matrices, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}
    return [group for group in groups if group["params"]]


def adamw_settings(settings: LearningSettings) -> Any:
    """Return the arguments of `torch.optim.AdamW`."""
    return {"lr": settings.learning_rate, "betas": settings.betas, "eps": settings.epsilon}


@cache
def _compiled_update() -> Callable[..., None]:
    return compiled(update, dynamic=True)


def _by_mesh(tensors: Iterable[torch.Tensor]) -> dict[Any, list[torch.Tensor]]:
    """Group tensors by their device mesh, because foreach and fused operations do not mix meshes."""
    by_mesh: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        by_mesh.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return by_mesh


def set_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):  # compiled updates read the rate from a tensor
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def set_hyperparameters(optimizers: Iterable[torch.optim.Optimizer], settings: LearningSettings) -> None:
    """Set β1, β2, ε and the weight decay of matrices; `set_rate` sets the learning rate before each update."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            decays = group["params"][0].dim() > 1
            group.update(betas=settings.betas, eps=settings.epsilon, weight_decay=settings.weight_decay * decays)


@torch.no_grad()
def reset_state(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Set moments and step counts to 0."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()


def step(
    optimizers: Sequence[torch.optim.Optimizer], norm: torch.Tensor, max_norm: float | None, masters: Masters | None
) -> None:
    """Clip, apply and free the gradients. If their norm is 0 or not finite, change nothing.

    A norm of 0 means that no token counts: momentum alone must not move the parameters. Clipping is a factor in the
    kernel of AdamW's update, so it needs no pass over the gradients, and no synchronization with the device. Other
    optimizers need both.

    Args:
        optimizers: the result of `make_optimizers`.
        norm: [] float32, L2 norm of all gradients on all ranks.
        max_norm: the norm to which gradients are clipped, None for no clipping.
        masters: float32 masters, or None if the optimizer updates the model's own parameters.

    Raises:
        RunError: an optimizer has created its state in this step. A checkpoint from before would lack it.
    """
    applies = norm.isfinite() & (norm > 0)
    over = torch.ones_like(norm) if max_norm is None else ((norm + 1e-6) / max_norm).clamp(min=1)
    if masters is not None and masters.updates_itself:
        adamw: Any = optimizers[0]  # the engine's own, and the only one
        masters.step(adamw, 1 / over, applies)
        return
    for optimizer in optimizers:
        if isinstance(optimizer, PiecewiseAdamW) or optimizer.defaults.get("fused"):
            scaled: Any = optimizer
            scaled.found_inf, scaled.grad_scale = (~applies).float(), None if max_norm is None else over
            optimizer.step()
        elif applies:
            _clip(optimizer, over)
            entries = _state_entries(optimizer)
            optimizer.step()
            if _state_entries(optimizer) != entries:
                raise RunError(
                    f"the optimizer {type(optimizer).__name__} creates its state in the first update, so that a "
                    "checkpoint could not be loaded into it",
                    hints=["create the state in the function that returns the optimizer, as `fsdp/muon` does"],
                )
        optimizer.zero_grad(set_to_none=True)
    if masters is not None:
        masters.sync()


def _clip(optimizer: torch.optim.Optimizer, over: torch.Tensor) -> None:
    """Divide the gradients by `over`, [] float32."""
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    for on_mesh in _by_mesh(map(own_part, gradients)).values():
        torch._foreach_div_(on_mesh, over)


def _state_entries(optimizer: torch.optim.Optimizer) -> int:
    return sum(map(len, optimizer.state.values()))
