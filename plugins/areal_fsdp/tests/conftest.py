import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.sdk import ACTOR
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine


def pytest_configure():
    torch.set_num_threads(1)


SIZES = {
    "vocab_size": 62,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True, pad_token_id=5),
    "llama": lambda: LlamaConfig(
        **SIZES, tie_word_embeddings=False, pad_token_id=40, attention_bias=True, mlp_bias=True
    ),
    "mistral": lambda: MistralConfig(**{**SIZES, "vocab_size": 61}, sliding_window=4),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=8,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        tie_word_embeddings=False,
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=True),
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16
    ),
    "gemma2": lambda: Gemma2Config(
        **SIZES, head_dim=8, query_pre_attn_scalar=8, final_logit_softcapping=4.0, attn_logit_softcapping=2.0
    ),
    "jamba": lambda: JambaConfig(
        **SIZES, num_experts=1, num_experts_per_tok=1, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=4
    ),
    "gpt2": lambda: GPT2Config(vocab_size=61, n_embd=32, n_layer=2, n_head=4, n_positions=64),
}


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    """Return a function that makes a model's folder. Large weights make outputs depend on temperature and position."""
    made = {}

    def make(kind="qwen3"):
        if kind not in made:
            torch.manual_seed(3)
            model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.mul_(6)
            made[kind] = tmp_path_factory.mktemp(kind)
            model.save_pretrained(made[kind])
        return made[kind]

    return make


@pytest.fixture(scope="session")
def program():
    """Return the module `rank_program`, which also has the batch and the losses that tests share."""
    path = Path(__file__).parent / "rank_program.py"
    specification = importlib.util.spec_from_file_location("areal_fsdp_rank_program", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules["areal_fsdp_rank_program"] = module
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def batch(program):
    return program.make_batch()


@pytest.fixture
def make_engine(model_folder):
    """Return a function that sets up an engine; the fixture closes all engines."""
    engines = []

    def make(kind="qwen3", role=ACTOR, temperature=1.0, dtype="float32", total_updates=100, is_exported=False, **more):
        folder = kind if isinstance(kind, Path) else model_folder(kind)
        engine = FSDPEngine(FSDPConfig(**{"learning_rate": 1e-3, **more}))
        settings = OptimizerSettings(total_updates, temperature, is_exported=is_exported)
        engine.setup(ModelReference(str(folder), dtype), role, settings)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture(scope="session")
def adapter_folder(tmp_path_factory, model_folder):
    """Return a function that makes an adapter's folder for a model; B is not 0, so that the adapter has an effect."""
    made = {}

    def make(kind="qwen3"):
        if kind not in made:
            engine = FSDPEngine(FSDPConfig(adapter={"rank": 4}))
            engine.setup(ModelReference(str(model_folder(kind))), ACTOR, OptimizerSettings(1, 1.0))
            generator = torch.Generator().manual_seed(5)
            with torch.no_grad():
                for name, value in engine._parameters.items():
                    if "lora_B" in name:
                        value.copy_(0.02 * torch.randn(value.shape, generator=generator))
            made[kind] = tmp_path_factory.mktemp(f"adapter-{kind}") / "export" / "adapter"
            engine.export(made[kind].parent)
            engine.close()
        return made[kind]

    return make
