"""The sizes of MoE models, against what their makers say of them and what transformers builds."""

import pytest

from areal_fsdp.planning.decoder import Decoder

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
    """Of all tensors, as files name them (a matrix for each expert) or as they stand in memory."""
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
def test_qwen3_30b_a3b_is_what_its_name_says(fused):
    model = Decoder.of(LARGE, shapes_of(LARGE, fused=fused))
    assert model.parameters == pytest.approx(30.53e9, rel=1e-3)
    assert model.active_parameters == pytest.approx(3.35e9, rel=1e-3)
    assert (model.experts, model.choices, model.intermediate) == (128, 8, 8 * 768)


def test_arithmetic_is_of_the_choices_alone():
    model = Decoder.of(LARGE, shapes_of(LARGE, fused=False))
    head = 151_936 * 2048
    wanted = 6 * (model.active_parameters - head) * 1000 + 6 * 48 * 4096 * 1000**2
    assert model.training_flops([1000]) == pytest.approx(wanted, rel=1e-5)


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
def test_other_layers_than_moe_and_shared_experts(changes, intermediate):
    assert Decoder.of(LARGE | changes, {}).intermediate == intermediate


def test_mixtral_s_experts_are_as_wide_as_its_config_says():
    dense = {k: v for k, v in LARGE.items() if k not in ("moe_intermediate_size", "num_experts")}
    model = Decoder.of({**dense, "num_local_experts": 8, "num_experts_per_tok": 2}, {})
    assert (model.experts, model.choices, model.intermediate) == (8, 2, 2 * 6144)
    assert Decoder.of({**dense, "num_local_experts": 8, "num_experts_per_tok": None}, {}) is None
