"""The engine with an adapter on one rank; `test_ranks.py` has several ranks, `test_conformance.py` the core's suite."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_core.engines import AdapterEngine, ModelReference
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, CRITIC, REFERENCE, LossResult
from areal_fsdp.config import FSDPConfig
from areal_fsdp.models import logprobs
from areal_testing.conformance.models import reference_outputs

ADAPTER = {"adapter": {"rank": 4}}


def test_the_engine_its_merged_export_and_peft_with_its_adapter_agree(
    tmp_path, make_engine, model_folder, program, batch
):
    engine = make_engine(**ADAPTER, learning_rate=1e-2)
    before = engine.forward(batch, ["logprobs"])["logprobs"]
    for _ in range(3):
        program.train(engine, batch)
    own = engine.forward(batch, ["logprobs"])["logprobs"]
    assert float((own - before).abs().max()) > 0.1
    engine.export(tmp_path / "export")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "export", attn_implementation="eager")
    base = AutoModelForCausalLM.from_pretrained(model_folder("qwen3"), attn_implementation="eager")
    by_peft = PeftModel.from_pretrained(base, tmp_path / "export" / "adapter")
    with torch.no_grad():
        for model in (merged, by_peft):
            found = reference_outputs(model, batch, 1.0)["logprobs"].float()
            torch.testing.assert_close(found, own, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"compile": True}, {"activation_checkpointing": "full"}])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly)])
def test_the_gradient_is_that_of_automatic_differentiation_through_peft(
    tmp_path, make_engine, model_folder, program, batch, adapter_folder, settings, dtype, monkeypatch
):
    monkeypatch.setattr("areal_fsdp.models.compiling.BACKEND", "aot_eager")
    folder = adapter_folder("llama")
    engine = make_engine("llama", adapter={"from_folder": folder}, dtype=dtype, **settings)
    found, _ = program.gradients_of(engine, batch)
    base = AutoModelForCausalLM.from_pretrained(model_folder("llama"), attn_implementation="eager", dtype=dtype)
    by_peft = PeftModel.from_pretrained(base, folder, is_trainable=True, autocast_adapter_dtype=False)
    program.policy_loss(batch, reference_outputs(by_peft, batch, 1.0)).loss.backward()
    wanted = {name: value.grad for name, value in by_peft.named_parameters() if value.requires_grad}
    assert len(found) == len(wanted) == 2 * 2 * 7
    for name, gradient in found.items():
        kind = name.replace("lora_A", "lora_A.default").replace("lora_B", "lora_B.default")
        other = wanted[f"base_model.model.{kind}"].float()
        gap = float((gradient.float() - other).norm() / other.norm())
        assert gap < (1e-4 if dtype == "float32" else 0.1), f"{name} differs by {gap}"


@pytest.mark.parametrize("outputs", [["logprobs", "entropy"], ["topk:3"]])
def test_no_gradient_of_a_frozen_head_is_computed(make_engine, program, batch, monkeypatch, outputs):
    products = []
    add = logprobs.add_product
    monkeypatch.setattr(logprobs, "add_product", lambda *tensors: products.append(add(*tensors)))
    loss = program.policy_loss if "logprobs" in outputs else _topk_loss
    program.train(make_engine(**ADAPTER), batch, loss, outputs)
    assert products == []
    program.train(make_engine(), batch, loss, outputs)
    assert products != []


def _topk_loss(batch, outputs):
    return LossResult((outputs["topk:3"].sum(-1) * batch["loss_weights"]).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_holds_only_the_adapter_and_its_moments(tmp_path, make_engine, program, batch, dtype):
    engine = make_engine(**ADAPTER, dtype=dtype)
    for _ in range(2):
        program.train(engine, batch)
    engine.save(tmp_path / "checkpoint")
    count = sum(value.numel() for value in engine._parameters.values())
    whole = sum(value.numel() for _, value in engine.named_full_parameters())
    shapes = {name: value.shape for name, value in engine.named_full_parameters()}
    assert count == FSDPConfig(**ADAPTER).adapter.parameters(shapes)
    assert all(value.dtype == torch.float32 for value in engine._parameters.values())
    written = sum(file.stat().st_size for file in (tmp_path / "checkpoint").glob("*.distcp"))
    assert 3 * 4 * count < written < 3 * 4 * count + 2000 * 3 * len(engine._parameters) + 20_000
    assert engine.snapshot_size() < 3 * 4 * count + 10_000 < 3 * 4 * whole
    wanted = [program.train(engine, batch) for _ in range(2)], program.parameters_of(engine)
    again = make_engine(**ADAPTER, dtype=dtype)
    again.load(tmp_path / "checkpoint")
    assert [program.train(again, batch) for _ in range(2)] == wanted[0]
    for name, value in program.parameters_of(again).items():
        assert torch.equal(value, wanted[1][name]), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_base_has_the_models_dtype_and_no_masters(make_engine, program, batch, dtype):
    engine = make_engine(**ADAPTER, dtype=dtype)
    program.train(engine, batch)
    for name, value in engine._module.model.named_parameters():
        assert value.dtype == getattr(torch, dtype), name
        assert value.requires_grad == ("lora_" in name), name
        assert value.grad is None or "lora_" in name, name
    assert len(engine._optimizers[0].state) == len(engine._parameters) == 2 * 2 * 7


def test_a_reference_from_the_base_equals_a_reference_of_its_own(make_engine, model_folder, program, batch):
    reference = ModelReference(str(model_folder("qwen3")))
    engine, apart = make_engine(**ADAPTER, learning_rate=1e-2), make_engine(role=REFERENCE)
    assert isinstance(engine, AdapterEngine)
    lent = engine.reference_from_base(reference, REFERENCE)
    name = f"divergence:{REFERENCE.name}:0.5"
    engine.compare_with({ACTOR.name: engine, REFERENCE.name: lent})
    program.train(engine, batch)
    wanted = apart.forward(batch, program.OUTPUTS)
    for _ in range(2):
        for output, values in lent.forward(batch, program.OUTPUTS).items():
            torch.testing.assert_close(values, wanted[output], atol=1e-6, rtol=0)
        found = program.compared(engine, lent, batch)
    torch.testing.assert_close(found["column"], program.compared(engine, apart, batch)["column"], atol=1e-6, rtol=0)
    assert float(found["column"].max()) > 1e-3, name
    for key, value in program.parameters_of(lent).items():
        assert torch.equal(value, program.parameters_of(apart)[key])
    with pytest.raises(RunError, match="frozen"):
        program.train(lent, batch)
    lent.close()
    program.train(engine, batch)


def test_a_reference_other_than_the_base_is_not_shared(make_engine, model_folder, adapter_folder):
    reference = ModelReference(str(model_folder("qwen3")))
    engine = make_engine(**ADAPTER)
    assert make_engine().reference_from_base(reference, REFERENCE) is None
    assert engine.reference_from_base(ModelReference("elsewhere"), REFERENCE) is None
    assert engine.reference_from_base(reference, CRITIC) is None
    begun = make_engine("llama", adapter={"from_folder": adapter_folder("llama")})
    assert begun.reference_from_base(ModelReference(str(model_folder("llama"))), REFERENCE) is None


def test_the_reference_of_a_policy_that_starts_from_an_adapter_has_the_adapter_too(make_engine, adapter_folder, batch):
    begun = {"adapter": {"from_folder": adapter_folder("llama")}}
    wanted = make_engine("llama", **begun).forward(batch, ["logprobs"])["logprobs"]
    plain = make_engine("llama", role=REFERENCE).forward(batch, ["logprobs"])["logprobs"]
    found = make_engine("llama", role=REFERENCE, **begun).forward(batch, ["logprobs"])["logprobs"]
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=0)
    assert float((found - plain).abs().max()) > 0.1


def test_a_critic_trains_its_head_in_addition_to_its_adapter(tmp_path, make_engine, program, batch):
    critic = make_engine("llama", role=CRITIC, dtype="bfloat16", **ADAPTER)
    assert critic._parameters["score.weight"].dtype == torch.float32
    before = critic._parameters["score.weight"].clone()
    program.train(critic, batch, program.hidden_loss, ["values", "hidden"])
    program.train(critic, batch, _value_loss, ["values"])
    assert not torch.equal(critic._parameters["score.weight"], before)
    critic.export(tmp_path / "export")
    assert (tmp_path / "export" / "adapter" / "adapter_model.safetensors").is_file()


def _value_loss(batch, outputs):
    return LossResult((outputs["values"].square() * batch["loss_weights"]).sum())


def test_wrong_combinations_are_refused_before_the_start(make_engine):
    class Run:
        longest_sequence, trainer_processes, inference_engine, model = 10, 2, None, ModelReference("elsewhere")

    (problem,) = FSDPConfig(**ADAPTER, parallel={"tensor": 2}).check(Run)
    assert "parallel.tensor is 2" in problem
    (problem,) = FSDPConfig(adapter={"from_folder": "nowhere"}).check(Run)
    assert "cannot be read" in problem
    with pytest.raises(RunError, match="no matrix in the model's layers is called query"):
        make_engine("llama", adapter={"modules": ["query"]})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sync_alone_sends_the_exported_adapter_and_the_export_keeps_the_whole_model(
    tmp_path, make_engine, model_folder, program, batch, dtype
):
    engine = make_engine("llama", adapter={"rank": 4, "alpha": 12, "sync": "alone"}, learning_rate=1e-2, dtype=dtype)
    for _ in range(3):
        program.train(engine, batch)
    own = program.parameters_of(engine)
    engine.export(tmp_path)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert own.keys() == saved.keys()
    for name, value in own.items():
        scale = 12 / 4 if "lora_B" in name else 1
        torch.testing.assert_close(
            value.float(), saved[name] * scale, atol=1e-6, rtol=1e-6 if dtype == "float32" else 0.01
        )
    files = load_file(model_folder("llama") / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == files.keys()
    lent = engine.reference_from_base(ModelReference(str(model_folder("llama")), dtype), REFERENCE)
    assert program.parameters_of(lent).keys() == files.keys()
