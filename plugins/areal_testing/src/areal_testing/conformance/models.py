"""Tiny models that show mistakes, and what they must compute, taken from transformers' own forward pass.

A freshly initialized model is nearly uniform: temperature, position and most weights hardly matter, and a wrong engine
passes. These models have weights so large that every one of them is seen in the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch

VOCABULARY = 61
"""A prime, so that no padding to a round size goes unnoticed."""
CONTEXT = 16384
FIRST_FORCED = 4
"""The token that version 0 of a constant model always gives; version v gives this plus v."""
ARCHITECTURES = {"qwen3": True, "llama": False}
"""Whether embeddings and head are one tensor."""
_SIZES: dict[str, Any] = {
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


def _fresh(architecture: str, seed: int) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture is '{architecture}'; there are {', '.join(ARCHITECTURES)}")
    tied = ARCHITECTURES[architecture]
    config = AutoConfig.for_model(architecture, **_SIZES, tie_word_embeddings=tied)
    build: Any = AutoModelForCausalLM.from_config
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return build(config)


def make_model(folder: Path, *, architecture: str = "qwen3", seed: int = 0) -> Path:
    """Write a random model of two layers, head size 32, as a Hugging Face folder without a tokenizer.

    Args:
        folder: where; made if needed.
        architecture: qwen3 (tied embeddings, norms of queries and keys) or llama (untied).
        seed: two seeds differ in every single tensor, the norms included.
    """
    model = _fresh(architecture, seed)
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
    """Write a model that gives one and the same token whatever came before: `FIRST_FORCED + version`.

    All tokens have one embedding and no layer adds to it; the head is certain of a single token. A token sampled by
    such a model says by itself which version sampled it, so that a wrong label shows.
    """
    model = _fresh("llama", 0)
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
    """A copy of a model's config and weights that lacks one tensor: what an adapter that drops it would pass on."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    rest = folder / f"without-{name}"
    rest.mkdir(exist_ok=True)
    (rest / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, rest / "model.safetensors", metadata={"format": "pt"})
    return rest


def load_reference(folder: Path) -> Any:
    """The model as transformers loads it, in float32 and with its plainest attention."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def next_token_logprobs(folder: Path, input_ids: Sequence[int], temperature: float) -> torch.Tensor:
    """[T, vocabulary] float64: at position t the log-probabilities of the token behind `input_ids[: t + 1]`."""
    with torch.no_grad():
        logits = load_reference(folder)(input_ids=torch.tensor([list(input_ids)])).logits[0]
    return torch.log_softmax(logits.double() / temperature, -1)


def reference_outputs(model: Any, batch: PackedBatch, temperature: float) -> dict[str, torch.Tensor]:
    """Log-probabilities of the targets and entropies, [sum(T)] float64 with gradients, one sequence at a time.

    Args:
        model: of `load_reference`.
        batch: shifted, with `input_ids` and `targets`.
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
