"""What differs on a GPU: the variable-length kernel, half precision, NCCL and offloading."""

import pytest
import torch

from areal_core.interfaces import LossResult

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def likelihood(part, outputs):
    return LossResult(-(outputs["logprobs"] * part["loss_weights"]).sum())


@pytest.mark.parametrize("settings", [{}, {"offload_parameters": True}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_learns(make_engine, batch, settings, dtype, tmp_path, program):
    engine = make_engine(dtype=dtype, learning_rate=1e-2, max_tokens_per_microbatch=60, **settings)
    losses = [program.train(engine, batch, likelihood) for _ in range(30)]
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]
    outputs = engine.forward(batch, ["logprobs"])["logprobs"]
    engine.save(tmp_path / "checkpoint")
    engine.export(tmp_path / "model")
    after = program.parameters_of(engine)
    engine.train(batch, likelihood, ["logprobs"])
    engine.load(tmp_path / "checkpoint")
    for name, tensor in program.parameters_of(engine).items():
        assert torch.equal(tensor, after[name])
    exported = make_engine(tmp_path / "model", dtype=dtype).forward(batch, ["logprobs"])["logprobs"]
    assert (exported - outputs).abs().mean() < (1e-4 if dtype == "float32" else 0.1)


def test_gradients_in_bfloat16_point_the_same_way(make_engine, program, batch):
    exact, _ = program.gradients_of(make_engine(), batch)
    half, _ = program.gradients_of(make_engine(dtype="bfloat16"), batch)
    flat = [torch.cat([gradients[name].flatten() for name in sorted(exact)]) for gradients in (exact, half)]
    assert torch.cosine_similarity(*flat, dim=0) > 0.98
