"""Compiled layers and head equal eager ones. Only the slowest test generates code; the others run traced graphs."""

import shutil
from itertools import product

import pytest
import torch
from torch._dynamo.utils import counters

from areal_core.data import Metric
from areal_core.errors import RunError
from areal_core.sdk import CRITIC, REFERENCE, LossResult
from areal_fsdp import masters
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.models import compiling, logprobs
from areal_fsdp.parallel.adamw import scalars_of, update

pytestmark = pytest.mark.slow
SHORT = {("qwen3", "full"), ("gpt2", "none"), ("qwen3_moe", "selective")}


def assert_close(found, wanted, tolerance=1e-5):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        scale = max(1.0, float(tensor.abs().max()))
        torch.testing.assert_close(
            found[name], tensor, atol=tolerance * scale, rtol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.fixture
def traced(monkeypatch):
    """Run traced graphs without code generation, and reset the counters."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    monkeypatch.setattr(compiling, "FEWEST_TOKENS", 0)
    monkeypatch.setattr(logprobs, "_SMALL_CHUNK_ELEMENTS", 0)
    torch._dynamo.reset()
    logprobs._functions.cache_clear()
    masters._update_function.cache_clear()
    counters.clear()
    yield
    torch._dynamo.reset()
    logprobs._functions.cache_clear()
    masters._update_function.cache_clear()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("kind", "recompute"),
    [
        pytest.param(*each, marks=[pytest.mark.nightly] * (each not in SHORT))
        for each in product(("qwen3", "gpt2", "qwen3_moe", "llama", "mistral"), ("none", "selective", "full"))
    ],
)
def test_compiled_equals_eager_without_recompilation(make_engine, program, kind, recompute):
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
    # Layers with and without gradients, reductions likewise, logits' gradient; an MoE has two kinds of layers, and
    # its routers, which are watched in training, one graph more.
    assert 0 < graphs <= (7 if kind == "qwen3_moe" else 5)


@pytest.mark.usefixtures("traced")
def test_a_rank_without_a_sequence_compiles_no_further_graph(make_engine, program, batch):
    """If entropy is only a metric, ranks with dummy micro-batches use the same graphs as the others."""

    def loss(part, outputs):
        value = (part["loss_weights"] * outputs["logprobs"]).sum()
        return LossResult(value, {"entropy": Metric.mean(outputs["entropy"].detach())})

    engine = make_engine(compile=True, logprob_chunk_tokens=16)
    program.train(engine, batch, loss)
    graphs = counters["stats"]["unique_graphs"]
    for part, place, _ in engine._rounds(batch, engine._plan(batch)):
        engine._backward(engine._compute(part, place, program.OUTPUTS), None, program.OUTPUTS)
    assert counters["stats"]["unique_graphs"] == graphs > 0


@pytest.mark.usefixtures("traced")
def test_micro_batches_and_roles_share_graphs(make_engine, program, batch):
    whole, _ = program.gradients_of(make_engine(), batch)
    engine = make_engine(compile=True, max_tokens_per_microbatch=31)
    assert_close(program.gradients_of(engine, batch)[0], whole)
    reference = make_engine(compile=True, role=REFERENCE).forward(batch, program.OUTPUTS)
    assert_close(reference, make_engine(role=REFERENCE).forward(batch, program.OUTPUTS))
    critic = make_engine(compile=True, role=CRITIC).forward(batch, ["values"])
    assert_close(critic, make_engine(role=CRITIC).forward(batch, ["values"]))


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
def test_bfloat16_with_masters(make_engine, program, batch):
    exact, _ = program.gradients_of(make_engine(), batch)
    for recompute in ("none", "selective", "full"):
        engine = make_engine(dtype="bfloat16", compile=True, activation_checkpointing=recompute)
        found, _ = program.gradients_of(engine, batch)
        assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}  # of a single micro-batch
        flat = [torch.cat([gradients[name].flatten() for name in sorted(exact)]) for gradients in (exact, found)]
        assert torch.cosine_similarity(*flat, dim=0) > 0.98


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("budget", [pytest.param(16384, marks=pytest.mark.nightly), 31])
def test_updates_of_masters_are_those_of_torch(make_engine, program, batch, budget):
    settings = {"warmup_steps": 3, "weight_decay": 0.1, "max_gradient_norm": 0.01, "max_tokens_per_microbatch": budget}
    plain, own = (make_engine(dtype="bfloat16", compile=on, **settings) for on in (False, True))
    for engine in (plain, own):
        engine._masters.updates_itself = engine is own
        for number in range(4):
            if number == 2:
                skipped = program.train(engine, batch, lambda p, o: LossResult(o["logprobs"].sum() * torch.nan))
                assert skipped["skipped"] == 1
            program.train(engine, batch)
    assert int(own._updates) == 5, "the one that was skipped counts for the schedule"
    for (name, mine), theirs in zip(own._parameters.items(), plain._parameters.values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=4e-4, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
        mine_state, their_state = own._optimizers[0].state[mine], plain._optimizers[0].state[theirs]
        assert float(mine_state["step"]) == float(their_state["step"]) == 4
    for working, mine in zip(own._masters._working, own._parameters.values(), strict=True):
        assert torch.equal(working, mine.bfloat16())
        assert working.grad is None


def test_an_update_of_one_tensor_equals_the_formula():
    torch.manual_seed(0)
    for shape in [(6, 128), (7,)]:
        parameter = torch.nn.Parameter(torch.randn(shape))
        optimizer = torch.optim.AdamW([parameter], lr=0.01, betas=(0.8, 0.9), eps=1e-4, weight_decay=0.1)
        mine, moments = parameter.detach().clone(), [torch.zeros(shape), torch.zeros(shape)]
        half = mine.bfloat16()
        for number in (1, 2, 3):
            parameter.grad = torch.randn(shape)
            optimizer.step()
            scalars = scalars_of(
                optimizer.param_groups[0], torch.tensor(float(number)), torch.tensor(2.0), torch.tensor(True)
            )
            update(mine, *moments, parameter.grad / 2, half, None, *scalars)
            torch.testing.assert_close(mine, parameter.detach())
            assert torch.equal(half, mine.bfloat16())


@pytest.mark.slow
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    "recompute", ["selective", *(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("none", "full"))]
)
def test_sharded(make_engine, program, batch, monkeypatch, recompute):
    eager, _ = program.gradients_of(make_engine(), batch)
    exact, _ = program.gradients_of(make_engine(dtype="bfloat16"), batch)
    monkeypatch.setattr(FSDPEngine, "_must_shard", lambda self: True)
    settings = {"compile": True, "activation_checkpointing": recompute, "max_tokens_per_microbatch": 40}
    engine = make_engine(**settings)
    assert_close(program.gradients_of(engine, batch)[0], eager)
    assert_close(program.gradients_of(engine, batch)[0], eager)
    half, _ = program.gradients_of(make_engine(**settings, dtype="bfloat16"), batch)
    difference = torch.cat([(half[name] - exact[name]).flatten() for name in half]).norm()
    assert difference < 0.02 * torch.cat([gradient.flatten() for gradient in exact.values()]).norm()


def test_masters_accumulate_gradients_in_float32(make_engine, program, batch):
    engine = make_engine(dtype="bfloat16")
    one, _ = program.gradients_of(engine, batch)
    twice, _ = program.gradients_of(make_engine(dtype="bfloat16", max_tokens_per_microbatch=31), batch)
    difference = torch.cat([(one[name] - twice[name]).flatten() for name in one]).norm()
    assert difference < 0.02 * torch.cat([gradient.flatten() for gradient in one.values()]).norm()


@pytest.mark.nightly
@pytest.mark.skipif(not (shutil.which("g++") or torch.cuda.is_available()), reason="needs a C++ compiler")
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_generated_code_equals_eager(make_engine, program, batch, recompute):
    torch._dynamo.reset()
    wanted, _ = program.gradients_of(make_engine(temperature=0.7), batch)
    engine = make_engine(temperature=0.7, compile=True, activation_checkpointing=recompute, logprob_chunk_tokens=16)
    assert_close(program.gradients_of(engine, batch)[0], wanted, 2e-5)
    torch._dynamo.reset()


def test_the_default_on_a_cpu_is_not_to_compile(monkeypatch, caplog):
    cpu = torch.device("cpu")
    assert not compiling.should_compile(None, cpu)
    assert not compiling.should_compile(False, cpu)
    monkeypatch.setattr(compiling.shutil, "which", lambda _: None)
    assert not compiling.should_compile(True, cpu)
    assert "no C++ compiler" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_named_kernel_that_is_not_installed_is_refused(make_engine, monkeypatch):
    from areal_fsdp.attention import kernels

    monkeypatch.setitem(kernels._MAKERS, "flash4", lambda: __import__("nothing_of_this_name"))
    kernels._kernel.cache_clear()
    with pytest.raises(RunError, match="attention_kernel: flash4 cannot be used here"):
        make_engine(dtype="bfloat16", attention_kernel="flash4")
    make_engine(dtype="bfloat16")
