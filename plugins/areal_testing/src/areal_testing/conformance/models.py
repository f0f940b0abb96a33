"""Tiny models that expose mistakes, and their expected outputs from transformers' forward pass.

A freshly initialized model is nearly uniform: temperature, position and most weights hardly matter, so a wrong engine
passes. These models have weights that are so large that each of them affects the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch

VOCABULARY = 61
"""Size of the vocabulary. It is a prime, so that padding to a round size is noticed."""
CONTEXT = 16384
"""Largest number of tokens of a sequence."""
FIRST_FORCED = 4
"""The token that version 0 of a constant model always generates. Version v generates this plus v."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "qwen3_moe": {
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
}
"""Architectures, and the settings of each beside the common dimensions."""
_DIMENSIONS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _new_model(architecture: str, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is '{architecture}': use {' or '.join(ARCHITECTURES)}")
    config = AutoConfig.for_model(architecture, **_DIMENSIONS, **ARCHITECTURES[architecture])
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(config)


def make_model(folder: Path, *, architecture: str = "qwen3", seed: int = 0) -> Path:
    """Write a random model of two layers, head size 32, as a Hugging Face folder without a tokenizer.

    Args:
        folder: the folder, which is created if needed.
        architecture: "qwen3" (tied embeddings, norms of queries and keys), "llama" (untied) or "qwen3_moe" (experts).
        seed: seed of the weights. Two seeds differ in every tensor, including the norms.

    Returns:
        `folder`.

    Raises:
        ValueError: the architecture is unknown.
    """
    model = _new_model(architecture, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
            else:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def make_constant_model(folder: Path, version: int) -> Path:
    """Write a model that always generates the token `FIRST_FORCED + version`. Return the folder.

    All tokens have one embedding, no layer adds to it, and the head gives all probability to one token. A token of such
    a model shows the version that sampled it, so that a wrong version label is noticed.
    """
    model = _new_model("llama", 0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        model.get_input_embeddings().weight.fill_(1.0)
        model.get_output_embeddings().weight.zero_()
        model.get_output_embeddings().weight[FIRST_FORCED + version] = 1.0
    model.save_pretrained(folder)
    return folder


def without_tensor(folder: Path, name: str) -> Path:
    """Copy a model's config and weights without one tensor, as a faulty adapter would send it. Return the folder."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    copy = folder / f"without-{name}"
    copy.mkdir(exist_ok=True)
    (copy / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def load_reference(folder: Path) -> Any:
    """Load a model with transformers in float32, with its eager attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def next_token_logprobs(folder: Path, input_ids: Sequence[int], temperature: float) -> torch.Tensor:
    """Return [T, vocabulary] float64: at position t the log-probabilities of the token after `input_ids[: t + 1]`."""
    with torch.no_grad():
        logits = load_reference(folder)(input_ids=torch.tensor([list(input_ids)])).logits[0]
    return torch.log_softmax(logits.double() / temperature, -1)


def reference_outputs(model: Any, batch: PackedBatch, temperature: float) -> dict[str, torch.Tensor]:
    """Return log-probabilities of the targets and entropies, [sum(T)] float64 with gradients, by name.

    The sequences go through the model one at a time.

    Args:
        model: a model of `load_reference`.
        batch: a shifted batch with `input_ids` and `targets`.
        temperature: divides the logits.
    """
    lengths = batch.lengths.tolist()
    logprobs, entropies = [], []
    sequences = (torch.split(batch[key], lengths) for key in ("input_ids", "targets"))
    for ids, targets in zip(*sequences, strict=True):
        table = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / temperature, -1)
        logprobs.append(table.gather(1, targets[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return {"logprobs": torch.cat(logprobs), "entropy": torch.cat(entropies)}
