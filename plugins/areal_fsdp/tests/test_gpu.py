"""Features of a GPU: attention kernels, half precision, NCCL and offloading."""

from dataclasses import replace

import pytest
import torch

from areal_core.sdk import LossResult
from areal_fsdp.attention import kernels
from areal_fsdp.attention.kernels import choose_kernel
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.models import compiling
from areal_fsdp.models.logprobs import token_logprobs
from areal_fsdp.parallel import moments
from areal_fsdp.parallel.tensor import own_part

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def _compile_small_batches(monkeypatch):
    monkeypatch.setattr(compiling, "FEWEST_TOKENS", 0)


def likelihood(part, outputs):
    return LossResult(-(outputs["logprobs"] * part["loss_weights"]).sum())


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"offload_parameters": True},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"optimizer_state_dtype": "bfloat16"},
        {"offload_optimizer": True},
        {"offload_optimizer": True, "optimizer_state_dtype": "bfloat16"},
        {"offload_optimizer": True, "compile": False},
        {"offload_parameters": True, "offload_optimizer": True, "optimizer_state_dtype": "bfloat16"},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learns(make_engine, batch, settings, dtype, tmp_path, program):
    engine = make_engine(dtype=dtype, learning_rate=1e-2, max_tokens_per_microbatch=60, **settings)
    losses = [program.train(engine, batch, likelihood) for _ in range(30)]
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]
    outputs = engine.forward(batch, ["logprobs"])["logprobs"]
    engine.save(tmp_path / "checkpoint")
    engine.export(tmp_path / "model")
    after = program.parameters_of(engine)
    program.train(engine, batch, likelihood, ["logprobs"])
    engine.load(tmp_path / "checkpoint")
    for name, tensor in program.parameters_of(engine).items():
        assert torch.equal(tensor, after[name])
    exported = make_engine(tmp_path / "model", dtype=dtype).forward(batch, ["logprobs"])["logprobs"]
    assert (exported - outputs).abs().mean() < (1e-4 if dtype == "float32" else 0.1)


def flat(gradients):
    return torch.cat([gradients[name].flatten().float() for name in sorted(gradients)])


@pytest.mark.parametrize("kind", ["qwen3", "llama", "mistral", "gpt2"])
def test_gradients_in_bfloat16_point_the_same_way(make_engine, program, batch, kind):
    exact, _ = program.gradients_of(make_engine(kind, compile=False), batch)
    for settings in (
        {},
        {"compile": False},
        {"activation_checkpointing": "selective"},
        {"max_tokens_per_microbatch": 40},
    ):
        half, _ = program.gradients_of(make_engine(kind, dtype="bfloat16", **settings), batch)
        assert torch.cosine_similarity(flat(exact), flat(half), dim=0) > 0.98, settings


def test_compiled_float32_equals_eager(make_engine, program, batch):
    exact, _ = program.gradients_of(make_engine(compile=False), batch)
    found, _ = program.gradients_of(make_engine(), batch)
    assert (flat(found) - flat(exact)).norm() < 1e-5 * flat(exact).norm()


def test_sharded_on_one_rank(make_engine, program, batch, monkeypatch):
    exact, _ = program.gradients_of(make_engine(compile=False), batch)
    monkeypatch.setattr(FSDPEngine, "_must_shard", lambda self: True)
    for settings in ({}, {"activation_checkpointing": True, "max_tokens_per_microbatch": 40}):
        half, _ = program.gradients_of(make_engine(dtype="bfloat16", **settings), batch)
        assert torch.cosine_similarity(flat(exact), flat(half), dim=0) > 0.98


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("vocabulary", [2000, 3072])
def test_head_has_float32_logits(compiled, vocabulary):
    torch.manual_seed(0)
    leaves = [torch.randn(size, 256, device="cuda").bfloat16().requires_grad_() for size in (300, vocabulary)]
    targets = torch.randint(vocabulary, (300,), device="cuda")
    upstream = torch.randn(2, 300, device="cuda", dtype=torch.float64)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found = token_logprobs(
        leaves[0], leaves[1], None, targets, temperature=8.0, chunk_tokens=128, with_entropy=True, compiled=compiled
    )
    log_p = torch.log_softmax(exact[0] @ exact[1].T / 8.0, -1)
    wanted = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    for values in (found, wanted):
        sum((value * weight).sum() for value, weight in zip(values, upstream, strict=True)).backward()
    for mine, right in zip(found, wanted, strict=True):
        assert (mine - right).abs().max() < 5e-5
    for mine, right in zip(leaves, exact, strict=True):
        assert (mine.grad - right.grad).norm() < 0.01 * right.grad.norm()


@pytest.mark.parametrize("name", ["cudnn", "flash4"])
def test_hopper_kernels(make_engine, program, batch, name):
    pytest.importorskip({"cudnn": "cudnn", "flash4": "flash_attn.cute"}[name])
    assert choose_kernel(name, 12, 2, 128, torch.device("cuda", 0)) == name
    exact, _ = program.gradients_of(make_engine(compile=False), batch)
    half, _ = program.gradients_of(make_engine(dtype="bfloat16", attention_kernel="auto"), batch)
    assert torch.cosine_similarity(flat(exact), flat(half), dim=0) > 0.98


@pytest.mark.parametrize("settings", [{}, {"optimizer_state_dtype": "bfloat16"}])
@pytest.mark.parametrize("sharded", [False, True])
def test_moments_in_host_memory_equal_moments_on_the_device(
    make_engine, program, batch, monkeypatch, settings, sharded
):
    """Many small pieces make slots and streams alternate. Both use the same function, so results are equal."""
    monkeypatch.setattr(moments, "PIECE", 100)
    monkeypatch.setattr(FSDPEngine, "_must_shard", lambda self: sharded)
    near, far = (make_engine(learning_rate=1e-2, compile=False, offload_optimizer=on, **settings) for on in (0, 1))
    for _ in range(5):
        for engine in (near, far):
            program.train(engine, batch, likelihood)
    for mine, theirs in zip(far._parameters.values(), near._parameters.values(), strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=0)
        for name in ("exp_avg", "exp_avg_sq"):
            found, wanted = (own_part(e._optimizers[0].state[p][name]) for e, p in ((far, mine), (near, theirs)))
            assert found.device.type == "cpu"
            assert found.is_pinned()
            assert wanted.is_cuda
            torch.testing.assert_close(found.float(), wanted.cpu().float(), atol=1e-4, rtol=0.02)


def test_moments_in_host_memory_use_no_gpu_memory(make_engine, program, batch):
    for on in (False, True):
        engine = make_engine(offload_optimizer=on)
        program.train(engine, batch, likelihood)
        state = [tensor for moments in engine._optimizers[0].state.values() for tensor in moments.values()]
        on_gpu = sum(tensor.nbytes for tensor in state if tensor.is_cuda and tensor.dim())
        assert on_gpu == (0 if on else 8 * sum(p.numel() for p in engine._parameters.values()))
        engine.close()


def test_selective_checkpointing_lowers_the_peak(make_engine, program):
    batch, peaks = program.make_batch(lengths=(64,) * 256), {}
    for mode in ("none", "selective", "full"):
        engine = make_engine("llama", dtype="bfloat16", activation_checkpointing=mode)
        program.train(engine, batch)
        torch.cuda.reset_peak_memory_stats()
        program.train(engine, batch)
        peaks[mode] = torch.cuda.max_memory_allocated()
        engine.close()
    assert peaks["full"] < peaks["selective"] < peaks["none"], peaks


def test_each_role_keeps_its_own_kernel(make_engine, batch, monkeypatch):
    """A critic or teacher with other heads may have another fastest kernel."""
    used = []
    kernel = kernels._torch_kernel()

    def counted(*arguments):
        used.append("flash4")
        return kernel.forward(*arguments)

    monkeypatch.setitem(kernels._MAKERS, "flash4", lambda: replace(kernel, name="flash4", forward=counted))
    kernels._kernel.cache_clear()
    first = make_engine(dtype="bfloat16", attention_kernel="flash4", compile=False)
    second = make_engine(dtype="bfloat16", attention_kernel="torch", compile=False)
    used.clear()
    second.forward(batch, ["logprobs"])
    assert not used
    first.forward(batch, ["logprobs"])
    assert used
    kernels._kernel.cache_clear()
