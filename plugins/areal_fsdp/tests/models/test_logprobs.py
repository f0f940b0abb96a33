import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from areal_fsdp.models.logprobs import (
    _of_logits,
    _of_logits_for_compiler,
    _reduce,
    _reduce_for_compiler,
    token_logprobs,
)

TOKENS, HIDDEN, VOCABULARY = 37, 12, 1009


def make(dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    offset = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64) if bias else None
    targets = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    leaves = [None if t is None else t.to(dtype).requires_grad_() for t in (hidden, weight, offset)]
    return leaves, targets


def naive(hidden, weight, bias, targets, temperature):
    log_p = torch.log_softmax(torch.nn.functional.linear(hidden, weight, bias) / temperature, -1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr("areal_fsdp.models.logprobs._SMALL_CHUNK_ELEMENTS", 0)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("of_entropy", [0.0, 0.3])
def test_values_and_gradients_equal_naive(temperature, bias, of_entropy):
    leaves, targets = make(torch.float32, bias)
    doubles = [None if t is None else t.detach().double().requires_grad_() for t in leaves]
    upstream = torch.linspace(-1, 1, TOKENS)
    for values in (leaves, doubles):
        if values is leaves:
            logprobs, entropy = token_logprobs(
                *values, targets, temperature=temperature, chunk_tokens=8, with_entropy=True
            )
        else:
            wanted_logprobs, wanted_entropy = naive(*values, targets, temperature)
            logprobs, entropy = wanted_logprobs, wanted_entropy
        total = (logprobs * upstream).sum()
        if of_entropy:
            total = total + of_entropy * (entropy * upstream.flip(0)).sum()
        total.backward()
        if values is leaves:
            torch.testing.assert_close(
                torch.stack([logprobs, entropy]).double(),
                torch.stack(naive(*doubles, targets, temperature)),
                atol=2e-5,
                rtol=0,
            )
    for found, exact in zip(leaves, doubles, strict=True):
        if found is not None:
            torch.testing.assert_close(found.grad.double(), exact.grad, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("vocabulary", [1009, 640])
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("count", [1, 4])
def test_the_functions_for_the_compiler_equal_the_others(vocabulary, temperature, count):
    torch.manual_seed(0)
    logits, targets = 5 * torch.randn(TOKENS, vocabulary), torch.randint(vocabulary, (TOKENS, count))
    targets[0] = vocabulary + 3  # a token of another rank, whose log-probability is not used
    wanted = _reduce(logits.clone(), targets, temperature, True)
    for mine, theirs in zip(_reduce_for_compiler(logits, targets, temperature, True), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    of_logprobs, of_entropy = torch.randn(TOKENS, count), torch.randn(TOKENS)
    for upstream in ((None, None), (wanted[2], of_entropy)):
        rest = (targets, wanted[0], of_logprobs, *upstream, temperature, torch.float32)
        torch.testing.assert_close(_of_logits_for_compiler(logits, *rest), _of_logits(logits.clone(), *rest))


@pytest.mark.usefixtures("small_chunks")
def test_several_tokens_of_each_position():
    """Values and gradients of the log-probabilities of several tokens, which may repeat, equal those of autograd."""
    leaves, _ = make(torch.float32)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    generator = torch.Generator().manual_seed(1)
    targets = torch.randint(VOCABULARY, (TOKENS, 5), generator=generator)
    targets[:, 1] = targets[:, 0]
    upstream = torch.randn(TOKENS, 5, generator=generator)
    logprobs, entropy = token_logprobs(*leaves, targets, temperature=0.7, chunk_tokens=8, with_entropy=True)
    ((logprobs * upstream).sum() + entropy.sum()).backward()
    table = torch.log_softmax(torch.nn.functional.linear(*exact) / 0.7, -1)
    wanted = table.gather(1, targets)
    ((wanted * upstream).sum() - (table.exp() * table).sum()).backward()
    torch.testing.assert_close(logprobs.double(), wanted, atol=2e-5, rtol=0)
    for found, other in zip(leaves, exact, strict=True):
        torch.testing.assert_close(found.grad.double(), other.grad, atol=5e-5, rtol=1e-5)


def test_entropy_alone_has_gradients():
    leaves, targets = make(torch.float32)
    _, entropy = token_logprobs(*leaves, targets, temperature=1.0, chunk_tokens=8, with_entropy=True)
    entropy.sum().backward()
    assert leaves[0].grad.abs().max() > 0


class LargestTensor(TorchDispatchMode):
    """Records the number of elements of the largest tensor that an operation makes."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return result


@pytest.mark.usefixtures("small_chunks")
def test_logits_of_all_tokens_never_exist():
    leaves, targets = make(torch.float32)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t.numel()), t)[1], lambda t: t)
    with hooks, LargestTensor() as largest:
        logprobs, entropy = token_logprobs(*leaves, targets, temperature=0.9, chunk_tokens=5, with_entropy=True)
        (logprobs + entropy).sum().backward()
    assert saved
    assert max(saved) <= VOCABULARY * HIDDEN
    assert largest.elements <= VOCABULARY * HIDDEN < VOCABULARY * TOKENS


def test_bfloat16_hidden_states():
    leaves, targets = make(torch.bfloat16)
    logprobs, _ = token_logprobs(*leaves, targets, temperature=1.0, chunk_tokens=8, with_entropy=False)
    logprobs.sum().backward()
    assert logprobs.dtype == torch.float32
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16] * 3
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    naive(*exact, targets, 1.0)[0].sum().backward()
    for leaf, wanted in zip(leaves, exact, strict=True):
        assert (leaf.grad.double() - wanted.grad).norm() < 0.02 * wanted.grad.norm()


@pytest.mark.parametrize("frozen", [(1,), (2,), (1, 2)])
def test_a_frozen_head_gets_no_gradient(frozen):
    """The gradients of the others do not change."""
    found = []
    for quiet in ((), frozen):
        leaves, targets = make(torch.float32)
        for place in quiet:
            leaves[place].requires_grad_(False)
        logprobs, _ = token_logprobs(*leaves, targets, temperature=0.7, chunk_tokens=8, with_entropy=False)
        logprobs.sum().backward()
        found.append([leaf.grad for leaf in leaves])
    for place, (every, some) in enumerate(zip(*found, strict=True)):
        assert (some is None) if place in frozen else torch.equal(every, some)
