"""The sizes of models equal the published ones, and those of the models that transformers builds."""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from areal_core.sdk import ACTOR
from areal_fsdp.config import FSDPConfig
from areal_fsdp.planning.decoder import Decoder
from areal_fsdp.planning.memory import RankLoad

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}
"""Qwen3-30B-A3B's config.json."""


def shapes_of(text, *, fused):
    """Return shapes by name, with a matrix for each expert as in files, or `fused` as in memory."""
    hidden, width, experts = text["hidden_size"], text["moe_intermediate_size"], text["num_experts"]
    query, key = (text[n] * text["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
    found = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (text["vocab_size"], hidden))
    found["model.norm.weight"] = (hidden,)
    for number in range(text["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        found |= {f"{layer}.self_attn.{n}_proj.weight": (size, hidden) for n, size in (("q", query), ("k", key))}
        found |= {
            f"{layer}.self_attn.v_proj.weight": (key, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, query),
        }
        found |= {f"{layer}.self_attn.{n}_norm.weight": (text["head_dim"],) for n in "qk"}
        found |= {f"{layer}.{n}_layernorm.weight": (hidden,) for n in ("input", "post_attention")}
        found[f"{layer}.mlp.gate.weight"] = (experts, hidden)
        if fused:
            found[f"{layer}.mlp.experts.gate_up_proj"] = (experts, 2 * width, hidden)
            found[f"{layer}.mlp.experts.down_proj"] = (experts, hidden, width)
            continue
        for expert in range(experts):
            for name in ("gate", "up", "down"):
                found[f"{layer}.mlp.experts.{expert}.{name}_proj.weight"] = (width, hidden)
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_qwen3_30b_a3b_has_the_published_sizes(fused):
    model = Decoder.of(LARGE, shapes_of(LARGE, fused=fused))
    assert model.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert model.active_parameters == pytest.approx(3.35e9, rel=1e-3)
    assert (model.experts, model.choices, model.intermediate) == (128, 8, 8 * 768)


def test_flops_count_only_the_chosen_experts():
    model = Decoder.of(LARGE, shapes_of(LARGE, fused=False))
    head = 151_936 * 2048
    wanted = 6 * (model.active_parameters - head) * 1000 + 6 * 48 * 4096 * 1000**2
    assert model.training_flops([1000]) == pytest.approx(wanted, rel=1e-5)


def test_a_window_and_layers_without_attention_have_fewer_pairs():
    kinds = ["linear_attention"] * 24 + ["sliding_attention"] * 12 + ["full_attention"] * 12
    shapes = shapes_of(LARGE, fused=True)
    shapes = {n: s for n, s in shapes.items() if ".self_attn." not in n or int(n.split(".")[2]) >= 24}
    model = Decoder.of({**LARGE, "layer_types": kinds, "sliding_window": 100}, shapes)
    assert (model.attention_layers, model.window_layers, model.window) == (24, 12, 100)
    pairs = 12 * 1000**2 / 2 + 12 * sum(min(place, 100) for place in range(1, 1001))
    attention = model.training_flops([1000]) - 1000 * model.training_flops([1])
    assert attention == pytest.approx(12 * 4096 * pairs, rel=0.01)


def test_the_memory_of_layers_without_attention():
    """Qwen3.5-2B on an H200 has a measured peak of 113 GiB, and of 37 GiB with `full`."""
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    sizes = {
        "vocab_size": 248320, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "head_dim": 256,
        "num_attention_heads": 8, "num_key_value_heads": 2, "layer_types": kinds * 6, "tie_word_embeddings": True,
    }  # fmt: skip
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, linear_num_value_heads=16))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    decoder = Decoder.of(sizes, shapes)
    assert (decoder.attention_layers, decoder.mixed) == (6, 3 * 2048 + 2048 + 2 * 16)
    load = RankLoad(sizes, shapes, ACTOR, "bfloat16", 1, tokens=32768, longest=3835, gpu_bytes=150 << 30)
    for checkpointing, measured in (("selective", 113), ("full", 37)):
        settings = FSDPConfig(max_tokens_per_microbatch=33000, activation_checkpointing=checkpointing)
        memory = settings.memory(load)
        assert memory.total / 2**30 == pytest.approx(measured, rel=0.05)
        assert "18 of 24 layers have no attention" in memory.recomputing


def test_the_memory_of_a_composite_model_trained_from_text():
    plain = {**LARGE, "num_hidden_layers": 2}
    shapes = shapes_of(plain, fused=True)
    inside = {n if "lm_head" in n else n.replace("model.", "model.language_model."): s for n, s in shapes.items()}
    composite = {"model_type": "composite", "text_config": plain, "vision_config": {}}
    tower = {"model.visual.blocks.0.weight": (1000, 1000)}
    loads = [
        RankLoad(description, named, ACTOR, "bfloat16", 1, tokens=4096, longest=1024, gpu_bytes=150 << 30)
        for description, named in ((plain, shapes), (composite, inside | tower))
    ]
    alone, whole = (FSDPConfig().memory(load) for load in loads)
    assert whole.total - alone.total == whole.resident - alone.resident == 2 * 1000**2
    assert FSDPConfig().memory(replace(loads[1], shows_images=True)) is None
    assert FSDPConfig().memory(replace(loads[1], shapes=shapes | tower)) is None, "of older files nothing is known"


def test_latent_attention_has_keys_of_two_parts():
    latent = {**LARGE, "head_dim": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    assert Decoder.of(latent, shapes_of(LARGE, fused=True)).query == 32 * 192


def test_a_rank_of_expert_parallelism_gathers_fewer_experts():
    model = Decoder.of(LARGE, shapes_of(LARGE, fused=False))
    experts = 128 * 3 * 768 * 2048
    part = model.divided(1, 4)
    assert model.largest_layer - part.largest_layer == experts * 3 // 4
    assert part.parameters == model.parameters, "what is sharded over all ranks stays so"


@pytest.mark.parametrize(
    ("changes", "intermediate"),
    [
        ({"mlp_only_layers": [0], "intermediate_size": 6144}, 6144),
        ({"mlp_only_layers": [0], "intermediate_size": 9000}, 9000),
        ({"shared_expert_intermediate_size": 512}, 8 * 768 + 512),
        ({"n_shared_experts": 2}, 10 * 768),
    ],
)
def test_dense_layers_and_shared_experts_of_an_moe(changes, intermediate):
    assert Decoder.of(LARGE | changes, {}).intermediate == intermediate


def test_mixtral_s_experts_are_as_wide_as_its_config_says():
    dense = {k: v for k, v in LARGE.items() if k not in ("moe_intermediate_size", "num_experts")}
    model = Decoder.of({**dense, "num_local_experts": 8, "num_experts_per_tok": 2}, {})
    assert (model.experts, model.choices, model.intermediate) == (8, 2, 2 * 6144)
    assert Decoder.of({**dense, "num_local_experts": 8, "num_experts_per_tok": None}, {}) is None
