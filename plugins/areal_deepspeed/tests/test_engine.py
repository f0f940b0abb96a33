"""What the core's suite does not ask: settings of the JSON at work, bfloat16, schedules, refused checkpoints."""

import importlib.util
import json

import pytest

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("DeepSpeed is not installed: see the README of areal-deepspeed", allow_module_level=True)

import torch

from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, EMA, REFERENCE, Role
from areal_deepspeed.config import DeepSpeedConfig
from areal_deepspeed.engine import DeepSpeedEngine

pytestmark = pytest.mark.slow
STAGES = {
    2: {"zero_optimization": {"stage": 2}},
    3: {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}},
}


@pytest.fixture
def start(model_folder, program):
    """A function that sets up an engine; all of them are closed at the end."""
    engines = []

    def make(config, *arguments, **named):
        engines.append(program.start(model_folder, config, *arguments, **named))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def same(found, wanted):
    return all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("stage", STAGES)
def test_the_rate_of_the_json_holds(stage, start, program):
    """So small that nothing moves visibly, and no default of ours in its place."""
    engine = start({**STAGES[stage], "optimizer": {"type": "AdamW", "params": {"lr": 1e-12}}})
    before = program.parameters_of(engine)
    assert program.train(engine, program.make_batch())["learning_rate"] == pytest.approx(1e-12)
    for name, value in program.parameters_of(engine).items():
        torch.testing.assert_close(value, before[name], atol=1e-10, rtol=1e-6)


@pytest.mark.parametrize("stage", STAGES)
def test_a_scheduler_of_the_json_drives_the_rate(stage, start, program, tmp_path):
    """And a checkpoint knows how far it is."""
    params = {"warmup_type": "linear", "warmup_num_steps": 4, "total_num_steps": "auto"}
    engine = start({**STAGES[stage], "scheduler": {"type": "WarmupDecayLR", "params": params}})
    batch, wanted = program.make_batch(), [0.0, 0.0, 0.25e-3, 0.5e-3, 0.75e-3, 1e-3]  # so do DeepSpeed's begin
    rates = [program.train(engine, batch)["learning_rate"] for _ in range(3)]
    engine.save(tmp_path / "checkpoint")
    rates += [program.train(engine, batch)["learning_rate"] for _ in range(3)]
    assert rates == pytest.approx(wanted)
    engine.load(tmp_path / "checkpoint")
    assert [program.train(engine, batch)["learning_rate"] for _ in range(3)] == pytest.approx(wanted[3:])


@pytest.mark.parametrize("stage", STAGES)
def test_updates_that_change_nothing_count_in_the_schedule(stage, start, program):
    from areal_core.sdk import LossResult

    engine, batch = start(STAGES[stage], warmup_steps=4), program.make_batch()
    nothing = batch.with_tokens(loss_weights=torch.zeros_like(batch["loss_weights"]))
    program.train(engine, batch)
    program.train(engine, batch, lambda part, found: LossResult(found["logprobs"].sum() * torch.nan))
    program.train(engine, nothing)
    assert program.train(engine, batch)["learning_rate"] == pytest.approx(1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_learns_with_float32_masters(stage, start, program, tmp_path):
    """Updates that are too small for bfloat16 add up; what is synced and saved is bfloat16."""
    batch, config = program.make_batch(), {**STAGES[stage], "bf16": {"enabled": "auto"}}
    engine = start(config, dtype="bfloat16", learning_rate=1e-5, max_gradient_norm=None)
    losses = [program.train(engine, batch)["loss"] for _ in range(8)]
    assert losses[-1] < losses[0]
    parameters = program.parameters_of(engine)
    assert {value.dtype for value in parameters.values()} == {torch.bfloat16}
    engine.save(tmp_path / "checkpoint")
    wanted = program.train(engine, batch)
    other = start(config, dtype="bfloat16", learning_rate=1e-5, max_gradient_norm=None)
    other.load(tmp_path / "checkpoint")
    assert same(program.parameters_of(other), parameters)
    assert program.train(other, batch) == wanted


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_skips_what_is_not_finite(stage, start, program):
    from areal_core.sdk import LossResult

    batch, config = program.make_batch(), STAGES[stage]
    engine = start(config, dtype="bfloat16")
    before = program.parameters_of(engine)
    metrics = program.train(engine, batch, lambda part, found: LossResult(found["logprobs"].sum() * torch.nan))
    assert metrics["skipped"] == 1
    assert same(program.parameters_of(engine), before)


@pytest.mark.parametrize("stage", STAGES)
def test_an_average_in_bfloat16_moves_by_less_than_bfloat16_tells(stage, start, program):
    batch, config = program.make_batch(), STAGES[stage]
    average = start(config, Role("average", ema=EMA(ACTOR.name)), dtype="bfloat16")
    leader = start(config, dtype="bfloat16", learning_rate=1e-2)
    program.train(leader, batch)
    before, target = program.parameters_of(average), program.parameters_of(leader)
    for _ in range(2000):
        average.update_ema(leader, 0.999)
    found = program.parameters_of(average)
    name = max(before, key=lambda key: float((target[key] - before[key]).abs().max()))
    left = (found[name] - target[name]).float().norm() / (before[name] - target[name]).float().norm()
    assert left < 0.3


@pytest.mark.parametrize("stage", STAGES)
def test_optimizer_on_the_host(stage, start, program):
    """`offload_optimizer`, and at stage 3 `offload_param`, become what the engine without them becomes."""
    batch, offload = program.make_batch(), {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    if stage == 3:
        offload["offload_param"] = {"device": "cpu", "pin_memory": False}
    plain = start(STAGES[stage])
    offloaded = start({"zero_optimization": {**STAGES[stage]["zero_optimization"], **offload}})
    for _ in range(3):
        assert program.train(offloaded, batch) == pytest.approx(program.train(plain, batch), abs=1e-5)
    for name, value in program.parameters_of(offloaded).items():
        torch.testing.assert_close(value, program.parameters_of(plain)[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("stage", STAGES)
def test_layers_are_computed_again_with_the_same_gradient(stage, start, program):
    batch = program.make_batch()
    wanted, _ = program.gradients_of(start(STAGES[stage]), batch)
    found, _ = program.gradients_of(start(STAGES[stage], activation_checkpointing=True), batch)
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=0)


def test_it_says_what_updates_took(start, program):
    from areal_core.engines import MeasuringEngine

    engine, batch = start(STAGES[2]), program.make_batch()
    assert isinstance(engine, MeasuringEngine)
    engine.forward(batch, ["logprobs"])
    program.train(engine, batch)
    found = engine.measurements()
    assert {"forward_s", "train_s", "tokens_per_s", "tflops_per_s", "microbatches"} <= found.keys()
    assert found["tokens_per_s"] * found["train_s"] == pytest.approx(batch.token_count)
    assert engine.measurements() == {}


def test_a_frozen_role_is_divided_at_stage_3(start):
    sizes = {}
    for stage, config in STAGES.items():
        engine = start(config, REFERENCE)
        sizes[stage] = sum(parameter.numel() for parameter in engine._module.parameters())
    assert sizes[2] > 0 == sizes[3]


def test_checkpoints_that_are_refused(start, program, tmp_path):
    """Of another stage, another role, and a damaged one; what was in the engine stays."""
    engine, critic = start(STAGES[2]), start(STAGES[2], CRITIC)
    engine.save(tmp_path / "checkpoint")
    before = program.parameters_of(engine)
    for written, other in ((2, 3), (3, 2)):
        start(STAGES[written]).save(tmp_path / f"stage{written}")
        with pytest.raises(RunError, match="which must have been written at the same stage of ZeRO"):
            start(STAGES[other]).load(tmp_path / f"stage{written}")
    with pytest.raises(RunError, match="loading the checkpoint"):
        critic.load(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / ".metadata").write_bytes(b"nothing")
    with pytest.raises(RunError, match="cannot be loaded"):
        engine.load(tmp_path / "checkpoint")
    assert same(program.parameters_of(engine), before)


def test_a_place_where_nothing_can_be_written(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be written"):
        start(STAGES[2]).save(tmp_path / "file")


def test_a_json_that_contradicts_the_run_is_refused_in_setup_too(start, tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({**STAGES[2], "bf16": {"enabled": True}}))
    with pytest.raises(RunError, match=r"bf16.enabled: true, but model.dtype is float32"):
        start(json.loads(path.read_text()))


@pytest.mark.parametrize(
    ("keys", "word"),
    [
        ({"reduce_bucket_size": 0}, "reduce_bucket_size: 0: Input should be greater than 0"),
        ({"overlap_comm": "maybe"}, "overlap_comm: 'maybe': Input should be a valid boolean"),
        ({"sub_group_size": "1 GB"}, "sub_group_size: '1 GB'"),
        ({"overlap_com": True}, "overlap_com: True: Extra inputs are not permitted"),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": 5}}, "offload_optimizer.pin_memory: 5"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.3}}, "Partial offloading only supported for ZeRO Stage 3"),
    ],
)
def test_what_deepspeed_does_not_take_is_told_in_its_words(keys, word, start):
    with pytest.raises(RunError, match=r"DeepSpeed refuses the config in train_engine\.config") as refused:
        start({"zero_optimization": {"stage": 2, **keys}})
    assert word in str(refused.value)


def test_a_schedule_that_deepspeed_does_not_take_is_told(start, tmp_path):
    """With the name of the file."""
    path, params = tmp_path / "zero.json", {"total_num_steps": 5}
    path.write_text(json.dumps({**STAGES[2], "scheduler": {"type": "WarmupLR", "params": params}}))
    engine = DeepSpeedEngine(DeepSpeedConfig(config=path))
    model = ModelReference(str(start(STAGES[2])._reference.path))
    with pytest.raises(RunError, match=r"config '.*/zero.json': .*total_num_steps"):
        engine.setup(model, ACTOR, OptimizerSettings(total_updates=10, temperature=1.0))


def test_what_deepspeed_is_given_is_told(start, capsys):
    auto = {"stage": 3, "reduce_bucket_size": "auto"}
    start({"zero_optimization": auto, "optimizer": {"type": "AdamW", "params": {"lr": 0.25, "eps": "auto"}}})
    told = json.loads(capsys.readouterr().err.partition("deepspeed, actor: config ")[2].partition("\n")[0])
    assert told["zero_optimization"]["reduce_bucket_size"] == 32**2
    assert told["optimizer"] == {"lr": 0.25, "betas": [0.9, 0.999], "eps": 1e-8}
    assert told["gradient_clipping"] == 1.0


def test_an_output_that_compares_roles_is_refused(start, program):
    engine = start(STAGES[2])
    with pytest.raises(RunError, match="does not compare roles"):
        engine.forward(program.make_batch(), ["divergence:reference:0.5"])


@pytest.mark.parametrize("stage", STAGES)
def test_an_moe_is_synced_and_exported_under_the_names_of_its_files(stage, program, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    sizes = {"vocab_size": 62, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes, moe_intermediate_size=48))
    model.save_pretrained(tmp_path / "model")
    engine = program.start(tmp_path / "model", STAGES[stage])
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    assert any(".experts.3.gate_proj." in name for name in wanted)
    found = program.parameters_of(engine)
    assert found.keys() == wanted.keys()
    assert same(found, wanted)
    engine.export(tmp_path / "exported")
    assert same(load_file(tmp_path / "exported" / "model.safetensors"), wanted)
    engine.close()


@pytest.mark.parametrize("stage", STAGES)
def test_a_router_s_bias_is_synced_and_exported_in_float32(stage, program, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, Dots1Config

    sizes = {"vocab_size": 62, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    config = Dots1Config(**sizes, moe_intermediate_size=16)
    model = AutoModelForCausalLM.from_config(config)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(name).normal_()
    model.save_pretrained(tmp_path / "model")
    engine = program.start(tmp_path / "model", {**STAGES[stage], "bf16": {"enabled": True}}, dtype="bfloat16")
    wanted = load_file(tmp_path / "model" / "model.safetensors")
    found = program.parameters_of(engine)
    assert found.keys() == wanted.keys()
    engine.export(tmp_path / "exported")
    for tensors in (found, load_file(tmp_path / "exported" / "model.safetensors")):
        assert torch.equal(tensors[name], wanted[name])
        assert {value.dtype for key, value in tensors.items() if key != name} == {torch.bfloat16}
    engine.close()


def test_a_model_that_keeps_parameters_in_float32_is_refused_in_bfloat16(program, tmp_path):
    from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig

    sizes = {"vocab_size": 62, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_num_experts": 4, "moe_k": 2}
    config = Ernie4_5_MoeConfig(**sizes, moe_intermediate_size=16)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match=r"keeps 'model.layers.1.mlp.gate.\S+' in float32, but DeepSpeed casts"):
        program.start(tmp_path / "model", {**STAGES[2], "bf16": {"enabled": True}}, dtype="bfloat16")


def test_models_that_see_images_are_refused(program, tmp_path):
    from transformers import AutoModelForImageTextToText, Qwen3VLConfig

    text = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = Qwen3VLConfig(text_config=text, vision_config={**vision, "deepstack_visual_indexes": [0]})
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "model")
    with pytest.raises(RunError, match="is a vision-language model, which the deepspeed engine does not support"):
        program.start(tmp_path / "model", STAGES[2])
