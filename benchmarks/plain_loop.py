"""The loop to beat in `gpu_train_step.py`: what a careful user of PyTorch writes for one GPU, without areal.

Float32 parameters under bfloat16 autocast, packed sequences with PyTorch's variable-length attention, each layer
compiled for the one shape that it sees, log-probabilities in checkpointed chunks of 4,096 tokens, fused AdamW.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedConfig

CHUNK = 4096


def register_attention(bounds: torch.Tensor, longest: int) -> None:
    """Make PyTorch's kernel known to transformers, for the one batch of this benchmark."""
    from torch.nn.attention.varlen import varlen_attn

    grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (tensor[0].transpose(0, 1).to(torch.bfloat16) for tensor in (query, key, value))
        attended: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0), **grouped)
        return attended.unsqueeze(0), None

    AttentionInterface.register("plain_varlen", attend)


def chunk_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """[tokens] float32, of the targets."""
    logits = F.linear(hidden, weight).float()
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(-1)


def plain_loop(
    config: PreTrainedConfig,
    batch: dict[str, torch.Tensor],
    lengths: list[int],
    *,
    recompute: bool,
    compiles: bool = True,
) -> Callable[[], None]:
    """One update of the loop, as a function.

    Args:
        config: of the model, whose weights are random.
        batch: `input_ids`, `targets`, `advantages`, [T] on the device.
        lengths: of the sequences.
        recompute: whether each layer's activations are computed again.
        compiles: whether layers are compiled, on a GPU.
    """
    device = batch["input_ids"].device
    bounds = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(device, torch.int32)
    position_ids = torch.cat([torch.arange(length) for length in lengths]).to(device)
    attention = "sdpa"  # on a CPU, where only the script is tried
    if device.type == "cuda":
        register_attention(bounds, max(lengths))
        attention = "plain_varlen"
    model = _make_model(config, device, attention)
    for layer in model.model.layers:
        forward = torch.compile(layer.forward) if compiles and device.type == "cuda" else layer.forward
        layer.forward = partial(checkpoint, forward, use_reentrant=False) if recompute else forward
    boundaries = {"cu_seq_lens_q": bounds} if device.type == "cuda" else {}  # flash-linear-attention reads them

    def forward_packed() -> torch.Tensor:
        ids, places = batch["input_ids"][None], position_ids[None]
        hidden: torch.Tensor = model.model(input_ids=ids, position_ids=places, use_cache=False, **boundaries)[0][0]
        return hidden

    return _update(model, forward_packed, batch)


def padded_loop(
    config: PreTrainedConfig,
    batch: dict[str, torch.Tensor],
    lengths: list[int],
    *,
    recompute: bool = True,
    autocast: bool = True,
) -> Callable[[], None]:
    """One update by transformers alone, as a function: a padded row for each sequence.

    Args:
        config: of the model, whose weights are random.
        batch: as for `plain_loop`.
        lengths: of the sequences.
        recompute: whether layers are computed again.
        autocast: whether products are in bfloat16.
    """
    device = batch["input_ids"].device
    needs_eager = config.model_type in ("gpt_oss", "gemma2")
    model = _make_model(config, device, "eager" if needs_eager else "sdpa")
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mask = torch.arange(max(lengths), device=device)[None] < torch.tensor(lengths, device=device)[:, None]
    ids = torch.zeros(mask.shape, dtype=torch.int64, device=device).masked_scatter(mask, batch["input_ids"])

    def forward_rows() -> torch.Tensor:
        hidden: torch.Tensor = model.model(input_ids=ids, attention_mask=mask.long(), use_cache=False)[0]
        return hidden[mask]

    return _update(model, forward_rows, batch, autocast=autocast)


def _make_model(config: PreTrainedConfig, device: torch.device, attention: str) -> Any:
    # Grouped matrix products compute in their parameters' dtype, whatever autocast says.
    is_moe = getattr(config, "num_experts", 0) or getattr(config, "num_local_experts", 0)
    dtype = torch.bfloat16 if is_moe else torch.float32
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)


def _update(
    model: Any, forward: Callable[[], torch.Tensor], batch: dict[str, torch.Tensor], *, autocast: bool = True
) -> Callable[[], None]:
    """A policy gradient from the hidden states [T, hidden size] that `forward` gives, and an optimizer's step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    total = len(batch["targets"])

    def step() -> None:
        with torch.autocast(batch["targets"].device.type, torch.bfloat16, enabled=autocast):
            parts = [
                checkpoint(chunk_logprobs, h, model.lm_head.weight, t, use_reentrant=False)
                for h, t in zip(forward().split(CHUNK), batch["targets"].split(CHUNK), strict=True)
            ]
            loss = -(batch["advantages"] * torch.cat(parts)).sum() / total
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step
