"""Compiled layers and head against eager ones. The compiler's code generator is left out, except in the slow test."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from areal_core.errors import RunError
from areal_core.interfaces import Role
from areal_fsdp import compiling, logprobs


def assert_close(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance * scale, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.fixture
def traced(monkeypatch):
    """Graphs are made and run as they are; counts start at nothing."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(logprobs, "_SMALL_CHUNK_ELEMENTS", 0)
    torch._dynamo.reset()
    logprobs._functions.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()
    logprobs._functions.cache_clear()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gpt2"])
def test_equals_eager_and_never_compiles_anew(make_engine, program, kind, recompute):
    eager = make_engine(kind, temperature=0.7)
    compiled = make_engine(
        kind, temperature=0.7, compile=True, activation_checkpointing=recompute, logprob_chunk_tokens=16
    )
    graphs = 0
    for lengths in [(9, 30, 3, 12, 12, 1, 25, 7), (40,), (3,) * 11, (30, 31), (2, 5, 40, 1)]:
        batch = program.make_batch(lengths)
        wanted, metrics = program.gradients_of(eager, batch)
        found, others = program.gradients_of(compiled, batch)
        assert_close(found, wanted)
        assert others == pytest.approx(metrics, abs=1e-5)
        assert_close(compiled.forward(batch, program.OUTPUTS), eager.forward(batch, program.OUTPUTS))
        graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs  # those of the first batch
    assert 0 < graphs <= 5  # layers with and without gradients, reductions with and without, logits' gradient


@pytest.mark.usefixtures("traced")
def test_any_microbatches_and_roles(make_engine, program, batch):
    whole, _ = program.gradients_of(make_engine(), batch)
    engine = make_engine(compile=True, max_tokens_per_microbatch=31)
    assert_close(program.gradients_of(engine, batch)[0], whole)
    reference = make_engine(compile=True, role=Role.REFERENCE).forward(batch, program.OUTPUTS)
    assert_close(reference, make_engine(role=Role.REFERENCE).forward(batch, program.OUTPUTS))
    critic = make_engine(compile=True, role=Role.CRITIC).forward(batch, ["values"])
    assert_close(critic, make_engine(role=Role.CRITIC).forward(batch, ["values"]))


@pytest.mark.usefixtures("traced")
def test_bfloat16_with_masters(make_engine, program, batch):
    exact, _ = program.gradients_of(make_engine(), batch)
    for recompute in (False, True):
        engine = make_engine(dtype="bfloat16", compile=True, activation_checkpointing=recompute)
        found, _ = program.gradients_of(engine, batch)
        assert {gradient.dtype for gradient in found.values()} == {torch.float32}
        flat = [torch.cat([gradients[name].flatten() for name in sorted(exact)]) for gradients in (exact, found)]
        assert torch.cosine_similarity(*flat, dim=0) > 0.98


def test_masters_add_up_in_float32(make_engine, program, batch):
    engine = make_engine(dtype="bfloat16")
    one, _ = program.gradients_of(engine, batch)
    twice, _ = program.gradients_of(make_engine(dtype="bfloat16", max_tokens_per_microbatch=31), batch)
    difference = torch.cat([(one[name] - twice[name]).flatten() for name in one]).norm()
    assert difference < 0.02 * torch.cat([gradient.flatten() for gradient in one.values()]).norm()


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or torch.cuda.is_available()), reason="needs a C++ compiler")
@pytest.mark.parametrize("recompute", [False, True])
def test_generated_code_equals_eager(make_engine, program, batch, recompute):
    torch._dynamo.reset()
    wanted, _ = program.gradients_of(make_engine(temperature=0.7), batch)
    engine = make_engine(temperature=0.7, compile=True, activation_checkpointing=recompute, logprob_chunk_tokens=16)
    assert_close(program.gradients_of(engine, batch)[0], wanted, 2e-5)
    torch._dynamo.reset()


def test_not_on_a_cpu_unless_asked(monkeypatch, caplog):
    cpu = torch.device("cpu")
    assert not compiling.should_compile(None, cpu)
    assert not compiling.should_compile(False, cpu)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    assert not compiling.should_compile(True, cpu)
    assert "no C++ compiler" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_kernel_that_is_missing_is_refused_by_name(make_engine, monkeypatch):
    from areal_fsdp import kernels

    monkeypatch.setitem(kernels._MAKERS, "flash4", lambda: __import__("nothing_of_this_name"))
    with pytest.raises(RunError, match="attention_kernel: flash4 cannot be used here"):
        make_engine(dtype="bfloat16", attention_kernel="flash4")
    make_engine(dtype="bfloat16")
