"""Models that cannot be packed support the same losses, roles and metrics as packed ones."""

import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification, GptOssConfig, GptOssForCausalLM, Phi3Config

from areal_core.errors import RunError
from areal_core.sdk import CRITIC, REFERENCE
from areal_fsdp.models import compiling, probe
from areal_fsdp.models.probe import Rung, UnfitError, choose_rung

CPU = torch.device("cpu")


@pytest.fixture
def make_in_rows(make_engine, monkeypatch):
    """Return a function like `make_engine` whose models fail the checks of packing."""

    def unfit(*_):
        raise UnfitError("forced")

    def make(*arguments, **settings):
        with monkeypatch.context() as patch:
            patch.setattr(probe, "_check_masks", unfit)
            engine = make_engine(*arguments, **settings)
        assert engine._module.in_rows
        assert engine._module.attention == "sdpa"
        return engine

    return make


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("budget", [31, 1000])
def test_padding_does_not_change_losses_and_router_metrics(make_engine, make_in_rows, program, batch, budget):
    settings = {"router_loss": 0.5, "max_tokens_per_microbatch": budget}
    wanted, expected = program.gradients_of(make_engine("mixtral", **settings), batch)
    found, metrics = program.gradients_of(make_in_rows("mixtral", **settings), batch)
    assert_close(found, wanted)
    assert {name for name in metrics if name.startswith("router")}
    assert metrics == pytest.approx(expected, abs=1e-5)


def test_replayed_experts_follow_their_tokens_into_rows(make_engine, make_in_rows, program, batch):
    packed, rows = make_engine("qwen3_moe"), make_in_rows("qwen3_moe")
    chosen = program.with_choices(packed, batch, missing=[2, 6])
    assert_close(rows.forward(chosen, program.OUTPUTS), packed.forward(chosen, program.OUTPUTS))
    wanted, expected = program.gradients_of(packed, chosen)
    found, metrics = program.gradients_of(rows, chosen)
    assert_close(found, wanted)
    assert metrics == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("student_in_rows", [True, False])
def test_roles_on_different_rungs_are_compared(make_engine, make_in_rows, program, batch, student_in_rows):
    student, teacher = (make_in_rows, make_engine) if student_in_rows else (make_engine, make_in_rows)
    wanted = program.compared(make_engine(), make_engine(role=REFERENCE, temperature=1.3), batch)
    found = program.compared(student(), teacher(role=REFERENCE, temperature=1.3), batch)
    assert_close(found, wanted)


def test_a_critic_in_rows(make_engine, model_folder, batch):
    engine = make_engine("gemma2", role=CRITIC)
    assert engine._module.in_rows
    head = engine._module.head.weight.detach()
    model = AutoModelForSequenceClassification.from_pretrained(
        model_folder("gemma2"), num_labels=1, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = batch["input_ids"].split(batch.lengths.tolist())
    with torch.no_grad():
        wanted = torch.cat([(model.model(input_ids=each[None])[0][0] @ head.T)[:, 0] for each in ids])
    torch.testing.assert_close(engine.forward(batch, ["values"])["values"], wanted, atol=1e-5, rtol=1e-5)


def test_a_micro_batch_counts_its_padding(make_in_rows, batch):
    engine = make_in_rows(max_tokens_per_microbatch=40)
    for part, (layout, _), _ in engine._rounds(batch, engine._plan(batch)):
        ((rows, width),) = layout.buckets.buckets
        assert rows * width <= 40
        assert rows == len(part)


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", ["selective", "full"])
def test_layers_are_compiled_around_their_mixers(make_engine, program, batch, monkeypatch, recomputes):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    compiled = make_engine("jamba", compile=True, activation_checkpointing=recomputes)
    assert compiled._choice.rung is Rung.MIXERS
    assert compiled._module.layers_in_parts == {0}
    found, wanted = (program.gradients_of(engine, batch)[0] for engine in (compiled, make_engine("jamba")))
    assert_close(found, wanted)


@pytest.mark.slow
def test_transposed_experts_are_not_compiled(tmp_path, program, batch, make_engine, monkeypatch):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 16, "num_attention_heads": 4, "head_dim": 8}
    GptOssForCausalLM(
        GptOssConfig(**sizes, num_hidden_layers=2, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    ).save_pretrained(tmp_path)
    compiled = make_engine(tmp_path, compile=True)
    assert compiled._choice.rung is Rung.PACKED
    assert compiled._module.layers_in_parts == {0, 1}
    found, wanted = (program.gradients_of(engine, batch)[0] for engine in (compiled, make_engine(tmp_path)))
    assert_close(found, wanted)


@pytest.mark.parametrize(("kind", "reason"), [("jamba", "JambaMambaMixer mixes"), ("gemma2", "softcap")])
def test_context_and_tensor_parallelism_need_packing(make_engine, kind, reason):
    module = make_engine(kind)._module
    module.attend_by("areal_packed")
    for name in module.mixers.names:
        del module.model.get_submodule(name).forward
    with pytest.raises(RunError, match=f"'{kind}' cannot be packed, but train_engine.parallel.context .*{reason}"):
        choose_rung(module, CPU, torch.float32, only_packed="train_engine.parallel.context")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jamba", "gemma2"])
def test_ranks_that_share_sequences_refuse_a_model_together(program, model_folder, tmp_path, kind):
    """Tokens leak on one rank alone: both must end with the reason, not wait for each other."""
    settings = json.dumps({"parallel": {"context": 2}})
    arguments = [str(tmp_path / "store"), str(model_folder(kind)), str(tmp_path), settings]
    processes = [
        subprocess.Popen(
            [sys.executable, program.__file__, str(rank), "2", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all("cannot be packed, but train_engine.parallel.context" in text for text in errors), errors


def test_a_rotary_embedding_by_length_needs_whole_sequences(make_engine, tmp_path):
    from transformers import AutoModelForCausalLM

    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 8}
    config = Phi3Config(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, original_max_position_embeddings=8, pad_token_id=None,
        rope_parameters={"rope_type": "longrope", "rope_theta": 10000.0, **factors}, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    module = make_engine(tmp_path)._module
    with pytest.raises(RunError, match=r"by the length of a sequence, which train_engine\.parallel\.context"):
        choose_rung(module, CPU, torch.float32, only_packed="train_engine.parallel.context")


def test_a_model_that_transformers_cannot_compute_is_refused_with_the_reason(make_engine, monkeypatch):
    def broken(*_, **__):
        raise ValueError("a library is missing")

    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaMLP.forward", broken)
    with pytest.raises(RunError, match=r"forward of model type 'llama' fails .*ValueError: a library is missing"):
        make_engine("llama")


def test_a_model_that_sees_later_tokens_is_refused(make_engine, monkeypatch):
    """In rows it computes the same as transformers, but a log-probability would depend on its own token."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    own = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: own(self, x + x.mean(1, keepdim=True)))
    with pytest.raises(RunError, match=r"model type 'llama': packed: LlamaMLP mixes.*rows: "):
        make_engine("llama")
