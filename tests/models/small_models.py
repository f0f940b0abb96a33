"""Tiny random models of many families, and how the FSDP engine computes each: values, gradients, export.

What a short batch would not show is made small: windows, chunks, sparse indexers and the original lengths of rotary
embeddings are shorter than the sequences. Gates, decays and norms are random too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import pytest
import torch
import transformers
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from areal_core.data import PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from pathlib import Path

    from _pytest.mark.structures import ParameterSet
    from transformers import PreTrainedModel

    from areal_core.data import Metric

TRAINED_MOST = {
    "deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss", "kimi_linear", "llama", "minimax_m2", "mistral", "nemotron_h",
    "olmo3", "phi3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "smollm3",
}  # fmt: skip
"""Families that `make test-all` tries. The nightly tests try the others, too."""
LENGTHS = (9, 5, 14, 3, 14)
WINDOW = 4
VOCABULARY = 61
TOLERANCE = 1e-5
"""Of log-probabilities in float32, relative to the largest."""
GRADIENT_TOLERANCE = 5e-5
"""Of gradients, relative to the largest: transformers' own differ by 3e-5 from those in float64."""
_SEED = 3
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_HEADS = {"head_dim": 8}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_INDEXER = {"index_topk": WINDOW, "index_head_dim": 8, "index_n_heads": 16}
_DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_LONG = {
    "original_max_position_embeddings": 8,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.2, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0, 9.0],
        "original_max_position_embeddings": 8,
    },
}
_GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

FAMILIES: dict[str, dict[str, object]] = {
    "afmoe": {**SIZES, **_HEADS, **_EXPERTS, "num_dense_layers": 1, "sliding_window": WINDOW},
    "apertus": {**SIZES, **_HEADS},
    "arcee": {**SIZES, **_HEADS},
    "bamba": {**SIZES, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "cohere": SIZES,
    "cohere2": {**SIZES, **_SLIDING},
    "cwm": {**SIZES, **_HEADS, **_SLIDING},
    "deepseek_v2": {**SIZES, **_ROUTED, **_LATENT},
    "deepseek_v3": {**SIZES, **_ROUTED, **_LATENT},
    "deepseek_v32": {**SIZES, **_ROUTED, **_LATENT, **_INDEXER, "head_dim": 4},
    "deepseek_v4": {
        **SIZES,
        **_EXPERTS,
        **_INDEXER,
        "n_routed_experts": 4,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "sliding_window": WINDOW,
        "num_hash_layers": 1,
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "layer_types": [
            "heavily_compressed_attention",
            "compressed_sparse_attention",
            "sliding_attention",
            "compressed_sparse_attention",
        ],
    },
    "diffllama": {**SIZES, **_HEADS},
    "doge": SIZES,
    "dots1": {**SIZES, **_HEADS, **_ROUTED},
    "ernie4_5": {**SIZES, **_HEADS},
    "ernie4_5_moe": {**SIZES, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16},
    "exaone4": {**SIZES, **_HEADS, **_SLIDING},
    "falcon": {**SIZES, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": {
        **SIZES,
        **_HEADS,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_ssm": 64,
        "mamba_d_state": 8,
        "mamba_chunk_size": 8,
        "lm_head_multiplier": 0.5,
        "embedding_multiplier": 1.5,
    },
    "falcon_mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "flex_olmo": {**SIZES, **_EXPERTS},
    "gemma": {**SIZES, **_HEADS},
    "gemma2": {
        **SIZES,
        **_HEADS,
        **_SLIDING,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": 1.5,
        "attn_logit_softcapping": 1.0,
    },
    "gemma3_text": {**SIZES, **_HEADS, **_SLIDING, "query_pre_attn_scalar": 8, "final_logit_softcapping": 1.5},
    "gemma4_text": {
        **SIZES,
        **_HEADS,
        **_SLIDING,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 1.5,
    },
    "glm": {**SIZES, **_HEADS},
    "glm4": {**SIZES, **_HEADS},
    "glm4_moe": {**SIZES, **_HEADS, **_ROUTED},
    "glm4_moe_lite": {**SIZES, **_ROUTED, **_LATENT},
    "glm_moe_dsa": {**SIZES, **_ROUTED, **_LATENT, **_INDEXER, "head_dim": 4},
    "gpt2": _GPT,
    "gpt_bigcode": _GPT,
    "gpt_neox": SIZES,
    "gpt_oss": {**SIZES, **_HEADS, **_SLIDING, **_LOCAL_EXPERTS},
    "gptj": {**_GPT, "rotary_dim": 4},
    "granite": {**SIZES, "logits_scaling": 6.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
    "granitemoe": {**SIZES, **_LOCAL_EXPERTS, "logits_scaling": 6.0},
    "granitemoehybrid": {
        **SIZES,
        **_LOCAL_EXPERTS,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 8,
        "shared_intermediate_size": 16,
        "logits_scaling": 6.0,
        "layer_types": ["mamba", "attention"],
    },
    "granitemoeshared": {**SIZES, **_LOCAL_EXPERTS, "shared_intermediate_size": 16, "logits_scaling": 6.0},
    "helium": {**SIZES, **_HEADS},
    "hunyuan_v1_dense": {**SIZES, **_HEADS},
    "hunyuan_v1_moe": {**SIZES, **_HEADS, "num_experts": 4, "moe_topk": 2},
    "hyperclovax": {**SIZES, **_HEADS, "logits_scaling": 0.25},
    "jamba": {
        **SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "jetmoe": {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 8, "num_key_value_heads": 2},
    "kimi_linear": {
        **SIZES,
        **_LATENT,
        "q_lora_rank": None,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {**SIZES, "layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {**SIZES, **_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama": {**SIZES, **_HEADS},
    "llama4_text": {
        **SIZES,
        **_HEADS,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "attention_chunk_size": WINDOW,
        "floor_scale": 4,
        "no_rope_layers": [1, 0],
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "longcat_flash": {
        **SIZES,
        **_LATENT,
        "num_layers": 2,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 16,
        "moe_topk": 2,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "head_dim": 4,
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "minicpm3": {**SIZES, **_LATENT, "dim_model_base": 16, "scale_emb": 2, "scale_depth": 1.4},
    "minimax": {**SIZES, **_HEADS, **_LOCAL_EXPERTS, "block_size": 4, "layer_types": _DELTA["layer_types"]},
    "minimax_m2": {**SIZES, **_HEADS, **_LOCAL_EXPERTS},
    "ministral": {**SIZES, **_HEADS, **_SLIDING},
    "ministral3": {**SIZES, **_HEADS},
    "mistral": {**SIZES, **_HEADS, "sliding_window": WINDOW},
    "mixtral": {**SIZES, **_LOCAL_EXPERTS, "sliding_window": WINDOW},
    "mpt": {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64},
    "nanochat": {**SIZES, "final_logit_softcapping": 1.5},
    "nemotron": {**SIZES, **_HEADS},
    "nemotron_h": {
        **SIZES,
        **_HEADS,
        **_ROUTED,
        "moe_shared_expert_intermediate_size": 16,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mamba"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": {**SIZES, **_SLIDING},
    "olmo_hybrid": {**SIZES, **_DELTA},
    "olmoe": {**SIZES, "num_experts": 4, "num_experts_per_tok": 2},
    "opt": {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "ffn_dim": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "word_embed_proj_dim": 32,
    },
    "phi": SIZES,
    "phi3": {**SIZES, **_LONG},
    "phimoe": {**SIZES, **_LOCAL_EXPERTS},
    "qwen2": {**SIZES, "use_sliding_window": True, **_SLIDING},
    "qwen2_moe": {**SIZES, **_EXPERTS, "shared_expert_intermediate_size": 16},
    "qwen3": {**SIZES, **_HEADS},
    "qwen3_5_moe_text": {**SIZES, **_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": {**SIZES, **_HEADS, **_DELTA},
    "qwen3_moe": {**SIZES, **_HEADS, **_EXPERTS},
    "qwen3_next": {**SIZES, **_HEADS, **_EXPERTS, **_DELTA, "shared_expert_intermediate_size": 16},
    "recurrent_gemma": {**SIZES, "attention_window_size": WINDOW, "lru_width": 32, "num_hidden_layers": 3},
    "seed_oss": {**SIZES, **_HEADS},
    "smollm3": {**SIZES, "use_sliding_window": True, **_SLIDING},
    "solar_open": {**SIZES, **_HEADS, **_ROUTED},
    "stablelm": SIZES,
    "starcoder2": {**SIZES, "sliding_window": WINDOW},
    "vaultgemma": {**SIZES, **_HEADS, **_SLIDING, "query_pre_attn_scalar": 8, "final_logit_softcapping": 1.5},
    "zamba2": {
        **SIZES,
        "mamba_d_state": 8,
        "mamba_ngroups": 2,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "attention_head_dim": 16,
        "num_hidden_layers": 3,
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "use_mem_rope": True,
    },
}


class Row(NamedTuple):
    """What became of a family.

    Attributes:
        rung: `packed`, `mixers`, `rows` or `refused`.
        why: it is not packed.
    """

    rung: str
    why: str


def by_tier(families: Iterable[str], fast: Collection[str]) -> list[ParameterSet]:
    """Return families as parameters of a test, each with the mark of its tier: none for those in `fast`."""
    return [pytest.param(family, marks=tier_of(family, fast)) for family in families]


def tier_of(family: str, fast: Collection[str]) -> list[pytest.MarkDecorator]:
    """Return the marks of a test of a family."""
    if family in fast:
        return []
    return [pytest.mark.slow if family in TRAINED_MOST else pytest.mark.nightly]


def make_model(family: str, folder: Path, **changes: object) -> None:
    """Write a random model whose layers all matter: a fault of any shows in the outputs."""
    settings = {**FAMILIES[family], "pad_token_id": None, "eos_token_id": 1, "bos_token_id": 1, **changes}
    config = transformers.CONFIG_MAPPING[family](**settings)
    torch.manual_seed(_SEED)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=1 / math.sqrt(parameter.shape[-1]))
            else:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(folder)


def architecture(family: str) -> str:
    """Return the name of the class that transformers makes of a family."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def load(folder: Path) -> PreTrainedModel:
    """Return transformers' model of a folder, in float32, with eager attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


def make_batch() -> PackedBatch:
    """Sequences of several lengths, with weights for the loss."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    tokens = {
        "input_ids": torch.randint(VOCABULARY, (total,), generator=generator),
        "targets": torch.randint(VOCABULARY, (total,), generator=generator),
        "weights": torch.randn(total, generator=generator),
    }
    return PackedBatch(Ragged(torch.tensor(LENGTHS), tokens), {})


def reference(folder: Path, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute what `reference_of` does with the model of a folder, in float32."""
    return reference_of(load(folder), batch)


def reference_of(model: torch.nn.Module, batch: PackedBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Compute log-probabilities [T] and gradients of their weighted sum by transformers, each sequence alone."""
    values = []
    columns = (batch[name].split(LENGTHS) for name in ("input_ids", "targets", "weights"))
    for ids, targets, weights in zip(*columns, strict=True):
        logits = model(input_ids=ids[None], use_cache=False).logits[0].float()
        logprobs = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        (logprobs * weights).sum().backward()
        values.append(logprobs.detach())
    return torch.cat(values), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def set_up(folder: Path, dtype: str = "float32", **settings: object) -> FSDPEngine:
    """An engine that trains the model of a folder, in micro-batches of 30 tokens."""
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-3, max_tokens_per_microbatch=30, **settings))
    engine.setup(ModelReference(str(folder), dtype), ACTOR, OptimizerSettings(1, 1.0))
    return engine


def gradients(engine: FSDPEngine, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Return the gradients of one update, summed over micro-batches and ranks, whole; the parameters stay."""
    found: dict[str, torch.Tensor] = {}

    def keep(rate: float) -> dict[str, Metric]:
        del rate
        for name, parameter in engine._parameters.items():
            if (gradient := parameter.grad) is not None:
                found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
                parameter.grad = None
        return {}

    engine._update = keep  # type: ignore[method-assign]
    try:
        engine.train([LossSpec("any", batch, ["logprobs"], weighted_sum)])
    finally:
        del engine._update  # type: ignore[method-assign]
    return found


def weighted_sum(part: PackedBatch, outputs: Mapping[str, torch.Tensor]) -> LossResult:
    """Return the loss of which `reference_of` has the gradients."""
    return LossResult((outputs["logprobs"] * part["weights"]).sum())


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest number."""
    found, wanted = found.detach(), wanted.detach()
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-3))


def measure(family: str, folder: Path) -> Row:
    """Compute, train and export a family.

    Raises:
        AssertionError: something differs from transformers.
    """
    make_model(family, folder / "model")
    batch = make_batch()
    wanted, wanted_gradients = reference(folder / "model", batch)
    try:
        engine = set_up(folder / "model")
    except RunError as error:
        return Row("refused", str(error).splitlines()[0])
    try:
        values = engine.forward(batch, ["logprobs"])["logprobs"]
        assert distance(values, wanted) < TOLERANCE, f"values: {distance(values, wanted):.2g}"
        found = gradients(engine, batch)
        largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
        for name, gradient in wanted_gradients.items():
            error = float((found.get(name, torch.zeros_like(gradient)) - gradient).abs().max()) / largest
            assert error < GRADIENT_TOLERANCE, f"gradient of {name}: {error:.2g}"
        engine.export(folder / "export")
        exported = AutoModelForCausalLM.from_pretrained(folder / "export", dtype=torch.float32)
        original = dict(AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters())
        for name, parameter in exported.named_parameters():
            assert torch.equal(parameter, original[name]), f"export of {name}"
        assert engine._choice is not None
        return Row(str(engine._choice.rung), "; ".join(engine._choice.reasons))
    finally:
        engine.close()
