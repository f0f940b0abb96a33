"""The plan of memory against what was measured on H200s, and against what layers truly keep for the backward pass."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from areal_attention.hugging_face import PACKED, Layout, register_packed_attention
from areal_core.interfaces import ACTOR, CRITIC, REFERENCE, PlansMemory, RankLoad
from areal_fsdp import compiling
from areal_fsdp.compiling import prepare_layers
from areal_fsdp.config import FSDPConfig
from areal_planning.decoder import Decoder
from areal_planning.memory import Computing, forward_memory, kept_activations, peak_memory

GIB = 1 << 30
TOKENS = 32_768
H200 = round(139.8 * GIB)


def qwen2(vocabulary, hidden, intermediate, heads, key_heads, *, tied):
    """A load of one rank: a model of 28 layers that is nowhere but in its shapes."""
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=28,
        num_attention_heads=heads, num_key_value_heads=key_heads, tie_word_embeddings=tied,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return RankLoad(config.to_dict(), shapes, ACTOR, "bfloat16", ranks=1, tokens=TOKENS, gpu_bytes=H200)


SMALL = qwen2(151_936, 1536, 8960, 12, 2, tied=True)
LARGE = qwen2(152_064, 3584, 18_944, 28, 4, tied=False)


@pytest.mark.parametrize(
    ("load", "ranks", "parallel", "rounds", "recomputes", "measured"),
    [
        (SMALL, 1, {}, 1, False, 91),
        (SMALL, 1, {}, 1, True, 34),
        (SMALL, 2, {}, 1, False, 80),
        (SMALL, 2, {}, 4, False, 83),
        (SMALL, 2, {}, 1, True, 23),
        (SMALL, 2, {"tensor": 2}, 1, False, 52),
        (SMALL, 2, {"context": 2}, 1, False, 83),
        # Of the program before, whose head held 2 GiB more.
        (SMALL, 1, {}, 4, False, 98),
        (SMALL, 1, {}, 8, False, 98),
        (SMALL, 1, {}, 4, True, 41),
        (SMALL, 1, {}, 8, True, 40),
        (SMALL, 4, {}, 1, False, 78),
        (LARGE, 4, {}, 1, True, 48),
    ],
)
def test_the_plan_is_within_a_tenth_of_measured_peaks(load, ranks, parallel, rounds, recomputes, measured):
    """Rows of docs/figures.md, "A train step on one H200" and "The FSDP engine over several H200s"."""
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing=recomputes, parallel=parallel)
    planned = settings.memory(replace(load, ranks=ranks, tokens=rounds * TOKENS))
    assert planned.total / GIB == pytest.approx(measured, rel=0.1)


def test_the_rows_that_no_config_asks_for_are_within_a_tenth_too():
    """One rank through `fully_shard`, and a forward pass of a role that learns."""
    model, chunk = Decoder.of(SMALL.description, SMALL.shapes), 8192
    sharded = Computing(TOKENS, 1, is_compiled=True, recomputes=False, chunk_tokens=chunk, shards=True)
    assert peak_memory(model, SMALL, sharded).total / GIB == pytest.approx(91, rel=0.1)
    assert forward_memory(model, SMALL, replace(sharded, shards=False)).total / GIB == pytest.approx(25, rel=0.1)


def test_parts_follow_what_the_engine_holds():
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS)
    assert isinstance(settings, PlansMemory)
    one, count = settings.memory(SMALL), 1_543_714_304
    assert one.parameters == (2 + 4) * count, "what computes in bfloat16, and its master"
    assert (one.optimizer, one.gradients) == (8 * count, 0)
    assert one.resident == 14 * count
    frozen = settings.memory(replace(SMALL, role=REFERENCE))
    assert (frozen.parameters, frozen.optimizer) == (2 * count, 0)
    exact = settings.memory(replace(SMALL, dtype="float32"))
    assert (exact.parameters, exact.optimizer) == (4 * count, 8 * count)
    critic = settings.memory(replace(SMALL, role=CRITIC))
    assert critic.head == 0, "one number a token"
    assert critic.total < one.total
    offloaded = settings.model_copy(update={"offload_parameters": True}).memory(replace(SMALL, ranks=4))
    assert offloaded.resident == 0
    unknown = {key: value for key, value in SMALL.description.items() if key != "intermediate_size"}
    assert settings.memory(replace(SMALL, description=unknown)) is None
    assert settings.memory(replace(SMALL, description={**SMALL.description, "num_experts": 8})) is None


def test_what_layers_of_no_compiler_keep_is_more():
    eager = FSDPConfig(max_tokens_per_microbatch=TOKENS, compile=False).memory(SMALL)
    compiled = FSDPConfig(max_tokens_per_microbatch=TOKENS).memory(SMALL)
    assert eager.activations - compiled.activations == 28 * TOKENS * 2 * 8960, "silu(gate)"


@pytest.mark.parametrize("room", [80 * GIB, 40 * GIB, 33 * GIB])
def test_remedies_fit_and_one_step_less_would_not(room):
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS)
    load = replace(SMALL, gpu_bytes=room, longest=2048)
    found = settings.remedies(load, room)
    assert found
    for changes in found:
        parsed = {key: value for key, _, value in (change.partition("=") for change in changes.split())}
        changed = FSDPConfig.model_validate({"max_tokens_per_microbatch": TOKENS, **parsed})
        assert changed.memory(load).total <= room
        if "max_tokens_per_microbatch" in parsed:
            more = {"max_tokens_per_microbatch": changed.max_tokens_per_microbatch + 1024}
            assert changed.model_copy(update=more).memory(load).total > room
    assert settings.remedies(load, GIB) == [], "nothing helps"


KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_keep_what_the_plan_says(monkeypatch, kind, recomputes):
    """The compiler chooses what a layer keeps, by the partitioner that serves GPUs too; here it writes no code."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    register_packed_attention()
    config = KINDS[kind](
        vocab_size=64, hidden_size=256, intermediate_size=1000, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.set_attn_implementation(PACKED)
    prepare_layers(model, compile_them=True, recompute=recomputes)
    layout, tokens = Layout.of([200, 312], torch.device("cpu"), for_graphs=True), 512
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def compute():
        position_ids = layout.position_ids[None]
        return model.model(torch.zeros(1, tokens, dtype=torch.int64), position_ids=position_ids, use_cache=False,
                           packed_layout=layout.packed)[0]  # fmt: skip

    compute()  # what compiles keeps more than what is compiled
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(compute())  # the head keeps it
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    load = RankLoad(config.to_dict(), shapes, ACTOR, "bfloat16", ranks=1)
    way = Computing(tokens, 1, is_compiled=True, recomputes=recomputes, chunk_tokens=tokens, shards=False)
    planned = kept_activations(Decoder.of(load.description, shapes), load, way)
    # The last norm, which no compiler sees here, keeps its input in float32 as well; rotations are kept once for all.
    beyond = tokens * (4 * 256 + 2 * 2 * 32)
    assert sum(kept.values()) - beyond == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("scalar", [False, True])
def test_one_rank_of_tensor_parallelism_has_the_whole_model(scalar):
    """The embeddings of a critic among it, which has no vocabulary in its head."""
    model = Decoder.of(SMALL.description, SMALL.shapes, scalar=scalar)
    assert model.divided(1) == model
    assert model.divided(2).parameters == model.parameters // 2
