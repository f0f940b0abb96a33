"""Each model of a process computes attention with its own kernel."""

import pytest
import torch

from areal_core.sdk import LossResult
from areal_fsdp.attention import hugging_face, kernels


@pytest.fixture
def used(monkeypatch):
    """Return the names of kernels in the order of their calls; all compute attention with PyTorch's operations."""
    calls = []

    def maker(name):
        def forward(q, k, v, bounds, reach):
            calls.append(name)
            return attended(q, k, v, bounds, reach).detach(), q.new_zeros(q.shape[1], len(q), dtype=torch.float32)

        def backward(gradient, q, k, v, out, lse, bounds, reach):
            calls.append(name)
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            with hugging_face._autograd_inside_an_operation():
                return torch.autograd.grad(attended(*leaves, bounds, reach), leaves, gradient)

        return lambda: kernels.Kernel(name, forward, backward)

    for name in ("flash4", "cudnn"):
        monkeypatch.setitem(kernels._MAKERS, name, maker(name))
    monkeypatch.setattr(hugging_face, "_has_kernel", lambda query: True)
    kernels._kernel.cache_clear()
    yield calls
    kernels._kernel.cache_clear()


def attended(q, k, v, bounds, reach):
    layout = kernels.PackedLayout.from_lengths(bounds.diff().tolist(), q.device)
    return kernels.packed_attention(q, k, v, layout, scale=reach.scale, window=reach.window or None)


def test_each_role_keeps_its_own_kernel(make_engine, batch, program, used):
    wanted = make_engine(compile=False).forward(batch, ["logprobs"])["logprobs"]
    engines = {}
    for name in ("flash4", "cudnn"):
        engines[name] = make_engine(compile=False)
        engines[name]._module.kernel = name
    for name in ("flash4", "cudnn", "flash4"):
        used.clear()
        torch.testing.assert_close(engines[name].forward(batch, ["logprobs"])["logprobs"], wanted)
        assert set(used) == {name}
    used.clear()
    program.train(engines["flash4"], batch, lambda part, out: LossResult(-out["logprobs"].sum()), ["logprobs"])
    assert set(used) == {"flash4"}
