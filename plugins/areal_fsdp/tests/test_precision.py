"""Tensors have the dtypes of transformers, and stored buffers are exported and synced like parameters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    ApertusConfig,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    FalconH1Config,
    Mamba2Config,
    MiniMaxM2Config,
    Mistral3Config,
)

from areal_core.engines import ModelReference
from areal_core.models.images import auto_class_of
from areal_core.sdk import ACTOR, REFERENCE
from areal_fsdp.models.model import load_model
from areal_fsdp.models.precision import kept_in_float32, round_frozen, stored_buffers

SIZES = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "deepseek_v3": lambda: DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=12,
    ),
    "minimax_m2": lambda: MiniMaxM2Config(**SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2),
    "apertus": lambda: ApertusConfig(**SIZES),
    "ernie4_5_moe": lambda: Ernie4_5_MoeConfig(**SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=16),
    "mamba2": lambda: Mamba2Config(
        vocab_size=62,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        n_groups=2,
        chunk_size=8,
    ),
    "falcon_h1": lambda: FalconH1Config(
        **SIZES,
        head_dim=8,
        mamba_n_heads=8,
        mamba_d_head=8,
        mamba_d_ssm=64,
        mamba_d_state=8,
        mamba_chunk_size=8,
        ssm_multipliers=[0.3, 0.7, 1.1, 0.9, 0.6],
    ),
}
"""A router's bias that stays float32; one that the files call otherwise; constants in the model's dtype; a router whose
weights stay float32; a residual in float32; factors that no file has, in the model's dtype."""
KEPT = {"deepseek_v3": ["e_score_correction_bias"], "ernie4_5_moe": ["gate.weight", "moe_statics"]}
"""Parts of the names of tensors that stay in float32."""
COMPOSITE = Mistral3Config(
    text_config={**SIZES, "model_type": "mistral", "head_dim": 8},
    vision_config={
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "head_dim": 8,
    },
    image_token_index=61,
)
"""No rank trains its vision tower."""


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """Return a function that makes a model's folder; stored buffers differ from those of a new model."""
    made = {}

    def make(kind):
        if kind not in made:
            torch.manual_seed(3)
            config = COMPOSITE if kind == "composite" else CONFIGS[kind]()
            model = auto_class_of(config).from_config(config)
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.mul_(3) if tensor.dim() > 1 else tensor.add_(0.3 * torch.randn_like(tensor))
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("kind", CONFIGS)
def test_tensors_have_the_dtypes_of_transformers(kind, in_parts, folder_of):
    wanted = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=torch.bfloat16)
    buffers = dict(wanted.named_buffers())
    for role in (ACTOR, REFERENCE):
        model, _ = load_model(ModelReference(str(folder_of(kind)), "bfloat16"), role, in_parts=in_parts)
        round_frozen(model, torch.bfloat16)
        found = dict(model.named_buffers())
        assert found.keys() == buffers.keys()
        assert stored_buffers(model).keys() == stored_buffers(wanted).keys()
        for name, buffer in buffers.items():
            assert found[name].dtype == buffer.dtype, name
            assert torch.equal(found[name], buffer), name
        kept = {name for name, parameter in wanted.named_parameters() if parameter.dtype == torch.float32}
        assert kept_in_float32(model, torch.bfloat16).keys() == kept
        assert not kept_in_float32(model, torch.float32)
    assert bool(kept) is (kind == "ernie4_5_moe")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["deepseek_v3", "minimax_m2", "apertus", "ernie4_5_moe"])
def test_stored_buffers_are_exported_and_synced(kind, dtype, folder_of, make_engine, program, tmp_path):
    engine = make_engine(folder_of(kind), dtype=dtype)
    synced = program.parameters_of(engine)
    engine.export(tmp_path / "export")
    wanted = AutoModelForCausalLM.from_pretrained(folder_of(kind), dtype=getattr(torch, dtype)).state_dict()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=getattr(torch, dtype)).state_dict()
    for name, tensor in wanted.items():
        torch.testing.assert_close(exported[name], tensor, atol=0, rtol=0, msg=name)
    files = load_file(folder_of(kind) / "model.safetensors")
    assert synced.keys() == files.keys() == load_file(tmp_path / "export" / "model.safetensors").keys()
    for name, tensor in files.items():
        assert torch.equal(synced[name], tensor.to(synced[name].dtype)), name
        is_kept = dtype == "float32" or any(part in name for part in KEPT.get(kind, ()))
        assert (synced[name].dtype == torch.float32) is is_kept, name


def test_a_float32_router_learns_and_computes_in_float32(folder_of, make_engine, program, batch):
    engine = make_engine(folder_of("ernie4_5_moe"), dtype="bfloat16")
    name = "model.layers.1.mlp.gate.weight"
    before = dict(engine.named_full_parameters())[name].clone()
    program.train(engine, batch)
    after = dict(engine.named_full_parameters())[name]
    assert after.dtype == torch.float32
    assert not torch.equal(after, before)
    assert not torch.equal(after, after.bfloat16().float())
    assert torch.equal(after, engine._parameters[name])


def test_an_actor_computes_the_same_as_its_reference(folder_of, make_engine, batch):
    """A float32 factor would make falcon_h1's mixers compute in float32."""
    actor, reference = (make_engine(folder_of("falcon_h1"), role, dtype="bfloat16") for role in (ACTOR, REFERENCE))
    outputs = [engine.forward(batch, ["logprobs"])["logprobs"] for engine in (actor, reference)]
    assert torch.equal(*outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [
        "ernie4_5_moe",
        "composite",
        *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("deepseek_v3", "mamba2", "falcon_h1")),
    ],
)
def test_two_ranks_compute_the_same_as_one_in_bfloat16(kind, folder_of, make_engine, program, batch, tmp_path):
    """They read the model in parts; FSDP casts neither float32 parameters nor the layers' inputs."""
    ranks = [
        subprocess.Popen(
            [sys.executable, Path(__file__).parent / "precision_program.py", str(rank), folder_of(kind), tmp_path],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
    engine = make_engine(folder_of(kind), dtype="bfloat16")
    outputs = engine.forward(batch, ["logprobs"])["logprobs"]
    stored = {name: tensor.clone() for name, tensor in engine.named_full_parameters()}
    gradients, _ = program.gradients_of(engine, batch)
    norm = program.train(engine, batch)["gradient_norm"]
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for result in (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)):
        assert result["log"] == [], "the model was not read in parts"
        buffers = dict(engine._module.model.named_buffers())
        assert result["buffers"].keys() == buffers.keys()
        for name, buffer in buffers.items():
            torch.testing.assert_close(result["buffers"][name], buffer, atol=0, rtol=0, msg=name)
        assert result["stored"].keys() == stored.keys()
        for name, tensor in stored.items():
            torch.testing.assert_close(result["stored"][name], tensor, atol=0, rtol=0, msg=name)
        assert float((result["outputs"] - outputs).abs().mean()) < 1e-4
        assert result["gradient_norm"] == pytest.approx(norm, rel=0.02)
        for name, gradient in gradients.items():
            worst = float((result["gradients"][name].float() - gradient.float()).abs().max())
            assert worst < 0.02 * largest, name
        for name, tensor in result["trained"].items():
            assert torch.equal(result["resumed"][name], tensor), name
            assert torch.equal(torch.load(tmp_path / "rank0.pt")["trained"][name], tensor), "ranks drift apart"
    exported = load_file(tmp_path / "export" / "model.safetensors")
    for name, tensor in stored.items():
        assert exported[name].dtype == tensor.dtype, name
