"""Moments in bfloat16 and in host memory: formula, rounding, checkpoints, and training."""

import pytest
import torch

from areal_core.sdk import LossResult
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.models import compiling
from areal_fsdp.optimizer import make_optimizer, step
from areal_fsdp.parallel import moments
from areal_fsdp.parallel.adamw import _bits, _round, scalars_of, update
from areal_fsdp.parallel.gradients import gradient_norm
from areal_fsdp.parallel.mesh import Ranks
from areal_fsdp.parallel.moments import PiecewiseAdamW

HALF = {"optimizer_state_dtype": "bfloat16"}


def likelihood(part, outputs):
    return LossResult(-(outputs["logprobs"] * part["loss_weights"]).sum())


def pieces_of(parameters, piece, monkeypatch, **settings):
    """Return a PiecewiseAdamW in float32, which `make_optimizer` uses only for other moments."""
    monkeypatch.setattr(moments, "PIECE", piece)
    config = FSDPConfig(learning_rate=0.01, betas=(0.8, 0.95), epsilon=1e-6, weight_decay=0.1, **settings)
    plain = make_optimizer(parameters, config)
    groups = [{"params": group["params"], "weight_decay": group["weight_decay"]} for group in plain.param_groups]
    own = PiecewiseAdamW(groups, update=update, lr=0.01, betas=config.betas, eps=1e-6)
    own.state.update(plain.state)
    return own


@pytest.mark.parametrize("piece", [5, 1 << 24])
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_float32_equals_torch_adamw(monkeypatch, piece, max_norm):
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in [(4, 3), (3,), (2, 2, 2), ()]]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    own = pieces_of(ours, piece, monkeypatch)
    plain = torch.optim.AdamW(
        [{"params": [p for p in theirs if p.dim() > 1]}, {"params": [theirs[1], theirs[3]], "weight_decay": 0.0}],
        lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, foreach=False,
    )  # fmt: skip
    for number in range(5):
        for mine, other in zip(ours, theirs, strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        if number < 3:  # as a part of a model that nothing has used yet
            ours[2].grad = theirs[2].grad = None
        if number == 2:
            ours[0].grad = torch.full_like(ours[0], torch.nan)
        norm = gradient_norm([p.grad for p in ours if p.grad is not None], Ranks())
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(theirs, max_norm)
        step([own], norm, max_norm, None)
        if number != 2:
            plain.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
        assert float(own.state[mine]["step"]) == (2 if mine is ours[2] else 4)


def test_rounding_is_correct_on_average_and_keeps_representable_values():
    step_, number = torch.tensor(3.0), torch.tensor(7)
    bits = _bits(torch.Size([1 << 18]), number, step_)
    assert int(bits.min()) >= 0
    assert int(bits.max()) < 1 << 32
    for part in (bits & 0xFFFF, bits >> 16):
        assert float(part.double().mean()) / 0xFFFF == pytest.approx(0.5, abs=0.005)
        for value in (1.0 + 2**-10, -3.14159, 1e-30):
            exact = torch.full((1 << 18,), value)
            found = _round(exact, part)
            assert torch.equal(found, found.bfloat16().float())
            assert len(found.unique()) == 2
            assert float(found.double().mean()) == pytest.approx(value, rel=2e-5)
    for kept in (0.0, 1.0, -2.5, 2.0**-126, torch.inf):
        assert torch.equal(_round(torch.full((8,), kept), torch.full((8,), 0xFFFF)), torch.full((8,), kept))
    same = _bits(torch.Size([64]), number, step_)
    assert torch.equal(same, bits[:64])
    for other in (_bits(torch.Size([64]), torch.tensor(8), step_), _bits(torch.Size([64]), number, step_ + 1)):
        assert not torch.equal(same, other)


def test_a_second_moment_decays_under_stochastic_rounding():
    """After a gradient of 1 and 1,000 updates with gradients of 0, the moment is 0.999 ** 1000."""
    config = {"betas": (0.9, 0.999), "lr": 0.0, "weight_decay": 0.0, "eps": 1e-8}
    parameter, mean, square = torch.zeros(4096), torch.zeros(4096).bfloat16(), torch.ones(4096).bfloat16()
    nearest = torch.ones(1).bfloat16()
    for number in range(1, 1001):
        scalars = scalars_of(config, torch.tensor(float(number)), torch.tensor(1.0), torch.tensor(True))
        update(parameter, mean, square, torch.zeros(4096), None, torch.tensor(0), *scalars)
        nearest = (nearest.float() * 0.999).bfloat16()
    assert float(square.double().mean()) == pytest.approx(0.999**1000, rel=0.01)
    assert float(nearest) > 0.95


def state_bytes(engine):
    return sum(t.nbytes for state in engine._optimizers[0].state.values() for k, t in state.items() if k != "step")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_moments_learn_like_float32_with_half_the_bytes(make_engine, program, batch, dtype):
    losses = {}
    for name, settings in {"float32": {}, "bfloat16": HALF}.items():
        engine = make_engine(dtype=dtype, learning_rate=1e-2, betas=(0.9, 0.99), **settings)
        losses[name] = [program.train(engine, batch, likelihood, ["logprobs"])["loss"] for _ in range(40)]
        numbers = sum(p.numel() for p in engine._parameters.values())
        assert state_bytes(engine) == (4 if settings else 8) * numbers
    assert losses["float32"][-1] < 0.5 * losses["float32"][0]
    assert losses["bfloat16"][-1] == pytest.approx(losses["float32"][-1], abs=0.03 * losses["float32"][0])
    assert losses["bfloat16"] != losses["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("compile_them", [False, True])
def test_compiled_and_eager_masters_round_alike(make_engine, program, batch, monkeypatch, compile_them):
    """The compiled update and PiecewiseAdamW use the same function: only sums in the model differ."""
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    engine = make_engine(dtype="bfloat16", compile=compile_them, **HALF)
    for _ in range(3):
        program.train(engine, batch)
    assert engine._masters.updates_itself is compile_them
    for state in engine._optimizers[0].state.values():
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert float(state["step"]) == 3
        assert state["exp_avg"].any()
    for working, master in zip(engine._masters._working, engine._parameters.values(), strict=True):
        assert torch.equal(working, master.bfloat16())


@pytest.mark.parametrize("sharded", [False, True])
def test_a_checkpoint_continues_bit_for_bit(make_engine, program, batch, tmp_path, monkeypatch, sharded):
    if sharded:
        monkeypatch.setattr(FSDPEngine, "_must_shard", lambda self: True)
    monkeypatch.setattr(moments, "PIECE", 100)
    engine = make_engine(**HALF)
    for _ in range(2):
        program.train(engine, batch)
    engine.save(tmp_path / "checkpoint")
    for _ in range(2):
        program.train(engine, batch)
    wanted = program.parameters_of(engine)
    other = make_engine(**HALF)
    other.load(tmp_path / "checkpoint")
    for _ in range(2):
        program.train(other, batch)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in program.parameters_of(other).items())


@pytest.mark.parametrize(("before", "after"), [({}, HALF), (HALF, {}), ({}, {"offload_optimizer": True})])
def test_a_checkpoint_with_moments_of_another_dtype_is_converted(make_engine, program, batch, tmp_path, before, after):
    engine = make_engine(**before)
    for _ in range(2):
        program.train(engine, batch)
    engine.save(tmp_path / "checkpoint")
    other = make_engine(**after)
    other.load(tmp_path / "checkpoint")
    for mine, theirs in zip(other._parameters.values(), engine._parameters.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", "step"):
            found, wanted = other._optimizers[0].state[mine][name], engine._optimizers[0].state[theirs][name]
            assert wanted.any()
            assert torch.equal(found, wanted.to(found.dtype))


def test_replicas_of_a_shard_stay_equal():
    """Two ranks with the same shard compute the same update without communication."""
    config = FSDPConfig(learning_rate=0.1, **HALF)
    found = []
    for _ in range(2):
        torch.manual_seed(torch.seed())  # of which nothing may depend
        parameters = [torch.nn.Parameter(torch.linspace(-1, 1, 300).view(3, 100)) for _ in range(2)]
        optimizer = make_optimizer(parameters, config)
        for number in range(3):
            for parameter in parameters:
                parameter.grad = torch.linspace(number, 3, 300).view(3, 100).sin()
            step([optimizer], torch.tensor(1.0), None, None)
        found.append([tensor for p in parameters for tensor in (p, *optimizer.state[p].values())])
        assert not torch.equal(*(optimizer.state[p]["exp_avg"] for p in parameters)), "each has its own"
    assert all(map(torch.equal, *found))
