"""Scale and cap of a model's logits are measured, and computed with exact gradients."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from areal_core.errors import RunError
from areal_fsdp.models.final_logits import FinalLogits, HeadMeasurement
from areal_fsdp.models.logprobs import token_logprobs
from areal_fsdp.models.wide import Head, wide_output

TOKENS, HIDDEN, WORDS = 7, 6, 11


@pytest.fixture
def model():
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    return AutoModelForCausalLM.from_config(config).eval()


def measured(model, change):
    """Return the measured formula of a model whose final logits are `change` of the head's output."""
    with torch.no_grad(), HeadMeasurement(model) as measurement:
        logits = change(model(input_ids=torch.arange(5)[None], use_cache=False).logits)
    return measurement.read(logits)


@pytest.mark.parametrize(
    ("change", "scale", "cap"),
    [
        (lambda z: z, 1.0, None),
        (lambda z: z / 6 + 3, 1 / 6, None),
        (lambda z: 30 * torch.tanh(z / 30), 1.0, 30.0),
        (lambda z: 5 * torch.tanh(0.5 * z / 5), 0.5, 10.0),
    ],
)
def test_scale_and_cap_are_measured_however_small_the_logits_are(model, change, scale, cap):
    _, final = measured(model, change)
    assert final.scale == pytest.approx(scale, rel=1e-5)
    assert final.cap == (None if cap is None else pytest.approx(cap, rel=1e-5))


def test_the_tokens_keep_their_logits(model):
    plain = model(input_ids=torch.arange(5)[None], use_cache=False).logits
    tokens, final = measured(model, lambda z: z)
    assert torch.equal(tokens, plain)
    assert final == FinalLogits()


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z.clamp(-20, 20),
        lambda z: -z,
        lambda z: z.index_fill(-1, torch.tensor([3]), -1e4),
        lambda z: z + torch.arange(WORDS),
        lambda z: z.sin(),
    ],
    ids=["clamped", "negated", "masked", "shifted by word", "periodic"],
)
def test_other_changes_of_logits_are_refused(model, change):
    with pytest.raises(RunError, match="model type 'llama' changes its logits"):
        measured(model, change)


def test_a_scale_of_hidden_states_is_measured(model):
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0] / 4,))
    assert measured(model, lambda z: z)[1].scale == pytest.approx(0.25)
    model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0].flip(-1),))
    with pytest.raises(RunError, match="does not get the hidden states"):
        measured(model, lambda z: z)


def inputs():
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (WORDS, HIDDEN), (WORDS,)
    return [(2 * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def capped_scores(hidden, weight, bias, cap, temperature):
    return torch.log_softmax(cap * torch.tanh((hidden @ weight.T + bias) / cap) / temperature, -1)


def test_capped_log_probabilities_and_entropy_have_autograds_gradients(monkeypatch):
    monkeypatch.setattr("areal_fsdp.models.logprobs._SMALL_CHUNK_ELEMENTS", 0)
    targets = torch.arange(TOKENS)
    leaves, others = inputs(), inputs()
    found, entropy = token_logprobs(*leaves, targets, temperature=0.7, chunk_tokens=3, with_entropy=True, cap=3.0)
    scores = capped_scores(*others, 3.0, 0.7)
    wanted = scores.gather(1, targets[:, None])[:, 0]
    wanted_entropy = -(scores.exp() * scores).sum(-1)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(entropy, wanted_entropy)
    weights = torch.linspace(-1, 1, TOKENS)
    (weights * (found + 0.3 * entropy)).sum().backward()
    (weights * (wanted + 0.3 * wanted_entropy)).sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad)


@pytest.mark.parametrize("beta", ["0", "0.5", "1"])
def test_a_capped_divergence_has_autograds_gradients(beta):
    leaves, others = inputs(), inputs()
    teacher = Head(*(part.detach() for part in inputs()), 1.3, 2.0)
    name = f"divergence:teacher:{beta}"
    found = wide_output(name, Head(*leaves, 0.7, 3.0), {"teacher": teacher}, 3)[name]
    log_q = capped_scores(*others, 3.0, 0.7)
    log_p = capped_scores(teacher.hidden, teacher.weight, teacher.bias, 2.0, 1.3)
    share = float(beta)
    log_m = torch.log(share * log_p.exp() + (1 - share) * log_q.exp())
    to_p = (log_p.exp() * (log_p - log_m)).sum(-1)
    to_q = (log_q.exp() * (log_q - log_m)).sum(-1)
    wanted = {"0": to_p, "1": to_q}.get(beta, share * to_p + (1 - share) * to_q)
    torch.testing.assert_close(found, wanted)
    found.sum().backward()
    wanted.sum().backward()
    for leaf, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(leaf.grad, other.grad, atol=1e-5, rtol=1e-5)
