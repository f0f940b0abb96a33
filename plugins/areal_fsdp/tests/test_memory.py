"""The memory plan agrees with peaks measured on H200s, and with the bytes that layers keep for the backward pass."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from areal_core.config import select
from areal_core.engines import StoredModel
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, REFERENCE
from areal_fsdp.attention.hugging_face import PACKED, Layout, register_packed_attention
from areal_fsdp.config import FSDPConfig
from areal_fsdp.models import compiling
from areal_fsdp.models.compiling import prepare_layers
from areal_fsdp.planning.decoder import Decoder
from areal_fsdp.planning.memory import Computing, RankLoad, forward_memory, kept_activations, peak_memory
from areal_fsdp.planning.recomputing import Recomputing, kept_by_a_layer

GIB = 1 << 30
TOKENS = 32_768
H200 = round(139.8 * GIB)


def qwen2(vocabulary, hidden, intermediate, heads, key_heads, *, tied):
    """Return the load of one rank for a model of 28 layers, from its shapes."""
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
        (SMALL, 1, {}, 1, "selective", 70),
        (SMALL, 1, {}, 8, "selective", 76),
        (SMALL, 2, {"replicas": 2}, 1, False, 88),
        (LARGE, 2, {}, 1, True, 67),
        (LARGE, 2, {"tensor": 2}, 1, True, 72),
        (LARGE, 2, {"context": 2}, 1, True, 68),
        # Measured before the head's memory fell by 2 GiB.
        (SMALL, 1, {}, 4, False, 98),
        (SMALL, 1, {}, 8, False, 98),
        (SMALL, 1, {}, 4, True, 41),
        (SMALL, 1, {}, 8, True, 40),
        (SMALL, 4, {}, 1, False, 78),
        (LARGE, 4, {}, 1, True, 48),
    ],
)
def test_the_plan_is_within_a_tenth_of_measured_peaks(load, ranks, parallel, rounds, recomputes, measured):
    """GiB on H200s, 32,768 tokens a rank: benchmarks/gpu_train_step.py and gpu_scaling.py (docs/benchmarks.md)."""
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing=recomputes, parallel=parallel)
    planned = settings.memory(replace(load, ranks=ranks, tokens=rounds * TOKENS))
    assert planned.total / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("load", "ranks", "settings", "measured"),
    [
        (SMALL, 1, {"activation_checkpointing": "selective", "activation_memory_gib": 20}, 47),
        (SMALL, 1, {"activation_checkpointing": "none", "optimizer_state_dtype": "bfloat16"}, 85),
        (SMALL, 1, {"activation_checkpointing": "none", "offload_optimizer": True}, 79),
        (LARGE, 2, {"activation_checkpointing": "full", "optimizer_state_dtype": "bfloat16"}, 53),
    ],
)
def test_the_plan_of_memory_choices_is_within_a_tenth_of_measured_peaks(load, ranks, settings, measured):
    """GiB on H200s: benchmarks/gpu_train_step.py and gpu_scaling.py (docs/benchmarks.md, "Memory")."""
    planned = FSDPConfig(max_tokens_per_microbatch=TOKENS, **settings).memory(replace(load, ranks=ranks))
    assert planned.total / GIB == pytest.approx(measured, rel=0.1)


def test_combinations_without_a_setting_are_within_a_tenth_of_measured_peaks():
    """One rank through `fully_shard`, and a forward pass of a role that learns."""
    model, chunk = Decoder.of(SMALL.description, SMALL.shapes), 8192
    sharded = Computing(TOKENS, 1, is_compiled=True, recomputing=Recomputing(), chunk_tokens=chunk, shards=True)
    assert peak_memory(model, SMALL, sharded).total / GIB == pytest.approx(91, rel=0.1)
    assert forward_memory(model, SMALL, replace(sharded, shards=False)).total / GIB == pytest.approx(25, rel=0.1)


def test_parts_equal_the_engine_s_tensors():
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS)
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


def test_the_memory_of_an_adapter():
    """The base is there once, in bfloat16; A and B have a copy in bfloat16, masters and moments."""
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing="full", adapter={"rank": 16})
    base, own = 7_615_616_512, 28 * 16 * (2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18_944))
    assert settings.adapter.parameters(LARGE.shapes) == own
    planned = settings.memory(LARGE)
    assert (planned.parameters, planned.optimizer) == (2 * base + 6 * own, 8 * own)
    assert planned.total < 0.4 * FSDPConfig(max_tokens_per_microbatch=TOKENS).memory(LARGE).total
    sharded = settings.memory(replace(LARGE, ranks=2))
    assert sharded.resident == (2 * base + (6 + 8) * own) / 2
    assert settings.memory(replace(LARGE, role=REFERENCE)).resident == 0
    with pytest.raises(RunError, match="no matrix in the model's layers is called query"):
        FSDPConfig(adapter={"modules": ["query"]}).memory(LARGE)


def test_the_meter_counts_no_gradient_of_a_frozen_matrix():
    model = Decoder.of(LARGE.description, LARGE.shapes)
    products = model.layer_parameters + model.vocabulary * model.hidden
    attention = 6 * model.layers * model.query * 100**2
    assert model.training_flops([100]) == 6 * products * 100 + attention
    assert model.training_flops([100], learning=1000) == (4 * products + 6 * 1000) * 100 + attention


@pytest.mark.parametrize(
    ("budget", "description"),
    [(60, "selective, 4 of 28 layers"), (20, "selective, 17 of 28 layers whole"), (1, "full")],
)
def test_a_plan_names_the_layers_that_recompute_within_a_budget(budget, description):
    settings = FSDPConfig(
        max_tokens_per_microbatch=TOKENS, activation_checkpointing="selective", activation_memory_gib=budget
    )
    assert settings.memory(SMALL).recomputing == description
    assert settings.memory(replace(SMALL, role=REFERENCE)).recomputing == ""


def test_eager_layers_keep_more():
    eager = FSDPConfig(max_tokens_per_microbatch=TOKENS, compile=False, activation_checkpointing="none").memory(SMALL)
    compiled = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing="none").memory(SMALL)
    assert eager.activations - compiled.activations == 28 * TOKENS * 2 * 8960, "silu(gate)"


def changed_by(settings, words):
    """Return settings with these overrides of a command line."""
    parsed = dict(word.split("=") for word in words.split())
    return FSDPConfig.model_validate(
        {**settings.model_dump(exclude_defaults=True), **{k: None if v == "null" else v for k, v in parsed.items()}}
    )


@pytest.mark.parametrize(("room", "mode"), [(80, "selective"), (60, "budget"), (40, "budget"), (29, "full and fewer")])
def test_remedies_fit_and_one_step_less_would_not(room, mode):
    settings = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing="none")
    load = replace(SMALL, gpu_bytes=room * GIB, longest=2048)
    found = settings.remedies(load, room * GIB)
    for changes in found:
        changed = changed_by(settings, changes)
        assert changed.memory(load).total <= room * GIB
        if "max_tokens_per_microbatch" in changes:
            more = {"max_tokens_per_microbatch": changed.max_tokens_per_microbatch + 1024}
            assert changed.model_copy(update=more).memory(load).total > room * GIB
        if "activation_memory_gib" in changes:  # a hundredth more would let a layer keep what it need not
            most = {"activation_memory_gib": changed.activation_memory_gib + 0.01}
            assert changed.model_copy(update=most).memory(load).total > room * GIB
    words = found[-1].split()
    assert words[0] == f"activation_checkpointing={'full' if 'full' in mode else 'selective'}"
    assert ["activation_memory" in found[-1], "tokens" in found[-1]] == [mode == "budget", "fewer" in mode]
    assert settings.remedies(load, GIB) == [], "nothing helps"


@pytest.mark.parametrize(
    ("tokens", "room", "moved"), [(2048, 24, "optimizer"), (2048, 8, "parameters"), (TOKENS, 14, "parameters")]
)
def test_host_memory_is_proposed_if_nothing_cheaper_fits(tokens, room, moved):
    settings = FSDPConfig(max_tokens_per_microbatch=tokens, activation_checkpointing="none")
    load = replace(SMALL, gpu_bytes=room * GIB, longest=tokens)
    (changes,) = settings.remedies(load, room * GIB)
    assert changes == f"offload_{moved}=true" + " activation_checkpointing=full" * (tokens == TOKENS)
    assert changed_by(settings, changes).memory(load).total <= room * GIB


def test_a_smaller_budget_is_proposed_if_it_is_too_large():
    settings = FSDPConfig(
        max_tokens_per_microbatch=TOKENS, activation_checkpointing="selective", activation_memory_gib=60
    )
    fewer, smaller = settings.remedies(replace(SMALL, longest=2048), 60 * GIB)
    assert fewer.startswith("max_tokens_per_microbatch=")
    assert changed_by(settings, smaller).activation_memory_gib < 60
    least = settings.remedies(replace(SMALL, longest=2048), 34 * GIB)[-1]
    assert least == "activation_checkpointing=full activation_memory_gib=null"
    assert changed_by(settings, least).activation_checkpointing == "full"


def test_a_budget_recomputes_the_least_that_keeps_within_it():
    """First layers recompute elementwise, as few as possible, then whole layers."""
    model = Decoder.of(SMALL.description, SMALL.shapes)
    sizes = kept_by_a_layer(model, 2, TOKENS, is_compiled=True)
    assert sizes["whole"] < sizes["elementwise"] < 0.7 * sizes["nothing"]
    former = None
    for budget in range(64 * GIB, 0, -GIB // 4):
        found = Recomputing.of("selective", 28, sizes, budget)
        kept = found.kept(28, sizes)
        assert kept <= budget or found == Recomputing(0, 28), "the least that there is"
        amounts = found.of_layers(28)
        assert len(amounts) == 28
        assert len(set(amounts)) <= 2
        if found not in (Recomputing(), former) and former is not None:
            cheaper = Recomputing(found.elementwise + 1, found.whole - 1) if found.whole else None
            assert cheaper is None or cheaper.kept(28, sizes) > budget
        former = found
    assert former == Recomputing(0, 28)


def test_the_planned_activations_keep_within_the_budget():
    before = FSDPConfig(max_tokens_per_microbatch=TOKENS, activation_checkpointing="none").memory(SMALL).total
    for gib in (60, 45, 40, 20, 6):
        settings = {"activation_checkpointing": "selective", "activation_memory_gib": gib}
        planned = FSDPConfig(max_tokens_per_microbatch=TOKENS, **settings).memory(SMALL)
        assert 0.9 * gib - 2 < planned.activations / GIB < gib + 0.3, "the last hidden states are no layer's"
        assert planned.total < before
        before = planned.total


def test_the_default_is_selective_for_compiled_layers_and_none_for_others():
    open_, eager = FSDPConfig(max_tokens_per_microbatch=TOKENS), FSDPConfig(compile=False)
    assert open_.memory(SMALL) == open_.model_copy(update={"activation_checkpointing": "selective"}).memory(SMALL)
    assert eager.memory(SMALL) == eager.model_copy(update={"activation_checkpointing": "none"}).memory(SMALL)


def test_contradictory_settings_of_checkpointing_are_refused():
    assert FSDPConfig(activation_checkpointing=True).activation_checkpointing == "full"
    assert FSDPConfig(activation_checkpointing=False).activation_checkpointing == "none"
    with pytest.raises(ValueError, match="leave the budget out"):
        FSDPConfig(activation_memory_gib=4)
    with pytest.raises(ValueError, match="less than or equal to 1048576"):
        FSDPConfig(activation_checkpointing="selective", activation_memory_gib=1e300)
    with pytest.raises(ValueError, match="'none', 'selective' or 'full'"):
        FSDPConfig(activation_checkpointing="most")


def test_the_memory_of_moments():
    count = 1_543_714_304
    cases = [({"optimizer_state_dtype": "bfloat16"}, 4), ({"offload_optimizer": True}, 0)]
    for settings, bytes_each in cases:
        planned = FSDPConfig(max_tokens_per_microbatch=TOKENS, **settings).memory(SMALL)
        assert planned.optimizer == bytes_each * count
        assert planned.resident == (6 + bytes_each) * count
    on_cpu = FSDPConfig(offload_optimizer=True).memory(replace(SMALL, gpu_bytes=None))
    assert on_cpu.optimizer == 8 * count, "a CPU has no other memory"


def test_the_memory_of_another_optimizer():
    """Muon has one moment for a layer's parameters and two for the others; the update reads gradients in float32."""
    written = {"type": "fsdp/fsdp", "max_tokens_per_microbatch": TOKENS, "optimizer": "muon"}
    config, own = select("train_engines", written).settings, FSDPConfig(max_tokens_per_microbatch=TOKENS)
    planned, usual = config.memory(SMALL), own.memory(SMALL)
    outside = 151_936 * 1536 + 1536
    count = usual.optimizer // 8
    assert planned.optimizer == 4 * (count - outside) + 8 * outside
    assert planned.resident == usual.resident - usual.optimizer + planned.optimizer
    stored = StoredModel(Path("model"), SMALL.description, SMALL.shapes)
    assert config.checkpoint_bytes(SMALL.role, stored) == 4 * count + planned.optimizer
    adapted = select("train_engines", {**written, "adapter": {"rank": 8}}).settings
    assert (
        2 * adapted.memory(SMALL).optimizer
        == own.model_copy(update={"adapter": adapted.adapter}).memory(SMALL).optimizer
    )


KINDS = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig, "qwen3_moe": Qwen3MoeConfig}
MOE = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 256}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recomputing",
    [
        Recomputing(2),
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in (Recomputing(), Recomputing(2, 1), Recomputing(0, 3))
        ),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layers_keep_the_planned_bytes(monkeypatch, kind, recomputing):
    """The compiler's partitioner chooses the tensors, as on GPUs; no code is generated."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    register_packed_attention()
    config = KINDS[kind](
        vocab_size=64, hidden_size=256, intermediate_size=1000, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        **(MOE if kind == "qwen3_moe" else {}),
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    model.set_attn_implementation(PACKED)
    prepare_layers(model, compile_them=True, recomputing=recomputing)
    layout, tokens = Layout.of([200, 312], torch.device("cpu"), "torch"), 512
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def compute():
        position_ids = layout.position_ids[None]
        return model.model(torch.zeros(1, tokens, dtype=torch.int64), position_ids=position_ids, use_cache=False,
                           packed_layout=layout.packed)[0]  # fmt: skip

    compute()  # the call that compiles keeps more
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        keep(compute())  # the head keeps the result
    for parameter in model.parameters():
        kept.pop(parameter.data_ptr(), None)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    load = RankLoad(config.to_dict(), shapes, ACTOR, "bfloat16", ranks=1)
    way = Computing(tokens, 1, is_compiled=True, recomputing=recomputing, chunk_tokens=tokens, shards=False)
    planned = kept_activations(Decoder.of(load.description, shapes), load, way)
    # The last norm, which no compiler sees here, keeps its input in float32 as well; rotations are kept once for all.
    beyond = tokens * (4 * 256 + 2 * 2 * 32)
    assert sum(kept.values()) - beyond == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("scalar", [False, True])
def test_one_rank_of_tensor_parallelism_has_the_whole_model(scalar):
    """A critic without a vocabulary head has embeddings too."""
    model = Decoder.of(SMALL.description, SMALL.shapes, scalar=scalar)
    assert model.divided(1) == model
    assert model.divided(2).parameters == model.parameters // 2


def moe(experts):
    """Return the load of one rank for a small MoE."""
    config = Qwen3MoeConfig(
        vocab_size=1000, hidden_size=256, moe_intermediate_size=128, num_experts=experts, num_experts_per_tok=2,
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    return RankLoad(config.to_dict(), shapes, ACTOR, "bfloat16", ranks=4, tokens=TOKENS, gpu_bytes=H200)


def test_the_memory_of_an_moe_and_experts_that_ranks_do_not_divide():
    plain = FSDPConfig().memory(moe(12))
    divided = FSDPConfig(compile=False, parallel={"expert": 4}).memory(moe(12))
    whole = FSDPConfig(compile=False).memory(moe(12))
    of_a_layer = 12 * 3 * 128 * 256
    assert whole.parameters - divided.parameters == 2 * 2 * of_a_layer * 3 // 4, "of two layers that are gathered"
    assert plain.activations < whole.activations, "compiled"
    left_open = FSDPConfig(parallel={"expert": 4}).memory(moe(12))
    assert left_open == divided, "layers whose tokens go to other ranks are not compiled"
    with pytest.raises(RunError, match="the model's 6 experts cannot be divided among 4 ranks") as caught:
        FSDPConfig(parallel={"expert": 4}).memory(moe(6))
    assert caught.value.hints == ("set train_engine.parallel.expert to 3",)
    with pytest.raises(RunError, match="the model has none"):
        FSDPConfig(parallel={"expert": 4}).memory(replace(SMALL, ranks=4))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"parallel": {"expert": 2}}, ""),
        ({"parallel": {"expert": 2}, "compile": False}, ""),
        ({"parallel": {"expert": 3}}, "does not divide the 4 ranks that shard parameters .*: set it to 2"),
        ({"parallel": {"expert": 2}, "compile": True}, "cannot be compiled: leave it out"),
        ({"parallel": {"context": 2}, "router_loss": 0.1}, "set it to 0, or context to 1"),
    ],
)
def test_settings_of_moe_models_that_cannot_be_combined(settings, word):
    config = SimpleNamespace(longest_sequence=100, trainer_processes=4)
    problems = list(FSDPConfig(**settings).check(config))
    assert len(problems) == bool(word)
    assert not word or re.search(word, problems[0])
