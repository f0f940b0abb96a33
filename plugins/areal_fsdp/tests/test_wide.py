"""Wide outputs equal plain formulas, among them TRL's, in chunks and between engines."""

import pytest
import torch
import torch.nn.functional as F

from areal_core.errors import RunError
from areal_core.sdk import EMA, REFERENCE, LossResult, Role
from areal_fsdp.models.wide import Head, compared_role, is_wide, wide_output

TOKENS, HIDDEN, VOCABULARY = 23, 12, 101
TEACHER = Role("teacher")


def make_head(seed, *, bias=True, temperature=0.8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator).to(dtype) for size in (TOKENS, VOCABULARY))
    offset = torch.randn(VOCABULARY, generator=generator).to(dtype) if bias else None
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in (hidden, weight, offset)]
    return Head(*leaves, temperature)


def doubled(head):
    leaves = (head.hidden, head.weight, head.bias)
    return Head(*(None if t is None else t.detach().double().requires_grad_() for t in leaves), head.temperature)


def distribution(head):
    return F.log_softmax(F.linear(head.hidden, head.weight, head.bias) / head.temperature, -1)


def jensen_shannon(own, other, beta):
    """Return TRL's `generalized_jsd_loss` for each token, with student `own` and teacher `other`."""
    student, teacher = distribution(own), distribution(other)
    if beta == 0:
        return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)
    if beta == 1:
        return F.kl_div(teacher, student, reduction="none", log_target=True).sum(-1)
    share = torch.tensor(beta, dtype=student.dtype)
    mixture = torch.logsumexp(torch.stack([student + torch.log1p(-share), teacher + torch.log(share)]), dim=0)
    of_teacher = F.kl_div(mixture, teacher, reduction="none", log_target=True)
    of_student = F.kl_div(mixture, student, reduction="none", log_target=True)
    return (share * of_teacher + (1 - share) * of_student).sum(-1)


def gradients(head):
    return [leaf.grad.double() for leaf in (head.hidden, head.weight, head.bias) if leaf is not None]


@pytest.mark.parametrize("chunk", [4, 100])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_divergence_has_the_values_and_gradients_of_the_formula(beta, bias, chunk):
    own, other = make_head(0, bias=bias), make_head(1, bias=bias, temperature=1.2)
    exact = doubled(own)
    wanted = jensen_shannon(exact, doubled(other), beta)
    found = wide_output(f"divergence:teacher:{beta}", own, {"teacher": other}, chunk)
    upstream = torch.linspace(-1, 1, TOKENS)
    (values,) = found.values()
    torch.testing.assert_close(values.double(), wanted, atol=1e-5, rtol=0)
    (values * upstream).sum().backward()
    (wanted * upstream).sum().backward()
    for gradient, exactly in zip(gradients(own), gradients(exact), strict=True):
        torch.testing.assert_close(gradient, exactly, atol=1e-5, rtol=1e-5)


def test_half_precision_is_reduced_in_float32():
    own, other = make_head(0, dtype=torch.bfloat16), make_head(1, dtype=torch.bfloat16)
    exact = doubled(own)
    (values,) = wide_output("divergence:teacher:1", own, {"teacher": other}, 8).values()
    wanted = jensen_shannon(exact, doubled(other), 1.0)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), wanted, atol=0.05, rtol=0.01)
    values.sum().backward()
    wanted.sum().backward()
    for gradient, exactly in zip(gradients(own), gradients(exact), strict=True):
        assert torch.cosine_similarity(gradient.flatten(), exactly.flatten(), 0) > 0.999


def test_the_likeliest_tokens_come_first_with_gradients():
    own = make_head(0)
    exact = doubled(own)
    found = wide_output("topk:5", own, {}, 4)
    wanted = distribution(exact).topk(5)
    assert torch.equal(found["topk:5:ids"], wanted.indices)
    torch.testing.assert_close(found["topk:5"].double(), wanted.values, atol=1e-5, rtol=0)
    upstream = torch.linspace(-1, 1, TOKENS * 5).view(TOKENS, 5)
    (found["topk:5"] * upstream).sum().backward()
    (wanted.values * upstream).sum().backward()
    for gradient, exactly in zip(gradients(own), gradients(exact), strict=True):
        torch.testing.assert_close(gradient, exactly, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("beta", [0, 0.5, 1])
@pytest.mark.parametrize("who", ["own", "other", "both"])
def test_a_token_with_probability_0_leaves_gradients_finite(who, beta):
    """If P or Q is 0, nothing is NaN; only KL(p ‖ q) with p > 0 and q = 0 is infinite."""
    heads = {"own": make_head(0), "other": make_head(1)}
    for name in heads if who == "both" else [who]:
        with torch.no_grad():
            heads[name].bias[7] = -torch.inf
    (values,) = wide_output(f"divergence:teacher:{beta}", heads["own"], {"teacher": heads["other"]}, 8).values()
    if (who, beta) in {("own", 0), ("other", 1)}:
        assert bool(values.isposinf().all())
        return
    assert bool(values.isfinite().all())
    values.sum().backward()
    assert all(bool(gradient.isfinite().all()) for gradient in gradients(heads["own"]))


def test_half_precision_accumulates_chunks_in_float32():
    """The weight's gradient is rounded once, for any number of chunks."""
    found = []
    for chunk in (1, 1000):
        own, other = make_head(0, dtype=torch.bfloat16), make_head(1, dtype=torch.bfloat16)
        (values,) = wide_output("divergence:teacher:0.3", own, {"teacher": other}, chunk).values()
        values.sum().backward()
        found.append(own.weight.grad.float())
    torch.testing.assert_close(found[0], found[1], atol=1e-3, rtol=1e-2)


def test_ids_that_one_vocabulary_lacks_are_left_out():
    own, other = make_head(0), make_head(1)
    padded = Head(other.hidden, torch.cat([other.weight, 9 * torch.ones(7, HIDDEN)]), None, other.temperature)
    other = Head(other.hidden, other.weight, None, other.temperature)
    (found,) = wide_output("divergence:teacher:0.5", own, {"teacher": padded}, 8).values()
    (wanted,) = wide_output("divergence:teacher:0.5", own, {"teacher": other}, 8).values()
    assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("divergence:teacher:1", "teacher"),
        ("divergence:my-teacher_2:0.25", "my-teacher_2"),
        ("divergence:teacher:1e-1", "teacher"),
        ("divergence:teacher:1.5", None),
        ("divergence:", None),
        ("divergence:teacher", None),
        ("divergence:teacher:e", None),
        ("divergence:teacher:1.2.3", None),
        ("divergence:teacher:-", None),
        ("divergence", None),
        ("logprobs", None),
    ],
)
def test_names_of_outputs(name, role):
    assert compared_role(name) == role
    assert is_wide(name) == (role is not None)


def compare(make_engine, model_folder, *, teacher="llama", **settings):
    student = make_engine("qwen3", **settings)
    other = make_engine(teacher, role=TEACHER, **settings)
    student.compare_with({"actor": student, "teacher": other})
    return student


def divergence_loss(name):
    return lambda part, outputs: LossResult((part["loss_weights"] * outputs[name]).sum())


def test_an_engine_compares_itself_with_another(make_engine, model_folder, program, batch):
    """The divergence is the same in micro-batches, as a column and as a loss, and training reduces it."""
    name = "divergence:teacher:0.5"
    student = compare(make_engine, model_folder, temperature=0.7, max_tokens_per_microbatch=40, learning_rate=1e-2)
    column = student.forward(batch, ["logprobs", name])[name]
    assert column.shape == (batch.token_count,)
    losses = [program.train(student, batch, divergence_loss(name), [name])["loss"] for _ in range(20)]
    assert losses[0] == pytest.approx(float((column * batch["loss_weights"]).sum()), rel=1e-5)
    assert losses[-1] < 0.5 * losses[0]
    assert float(student.forward(batch, [name])[name].min()) >= 0


def test_the_divergence_is_computed_from_both_models(make_engine, model_folder, batch):
    from transformers import AutoModelForCausalLM

    found = compare(make_engine, model_folder, temperature=0.7).forward(batch, ["divergence:teacher:0"])
    models = [
        AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32) for kind in ("qwen3", "llama")
    ]
    wanted = []
    for ids in batch["input_ids"].split(batch.lengths.tolist()):
        q, p = (torch.log_softmax(model.eval()(input_ids=ids[None]).logits[0].double() / 0.7, -1) for model in models)
        wanted.append((p.exp() * (p - q)).sum(-1))
    torch.testing.assert_close(found["divergence:teacher:0"].double(), torch.cat(wanted), atol=1e-4, rtol=0)


@pytest.mark.parametrize("other", [TEACHER, Role("average", ema=EMA("actor")), Role("peer", trains=True)])
def test_the_compared_engine_gets_no_gradient(other, make_engine, program, batch):
    name = f"divergence:{other.name}:0.5"
    student, peer = make_engine(), make_engine("llama", role=other)
    student.compare_with({"actor": student, other.name: peer})
    before = program.parameters_of(peer)
    program.train(student, batch, divergence_loss(name), [name])
    assert all(parameter.grad is None for parameter in peer._parameters.values())
    assert all(torch.equal(tensor, before[key]) for key, tensor in program.parameters_of(peer).items())


def test_a_sequence_too_long_for_the_compared_model_is_refused(make_engine, batch):
    student, teacher = make_engine(), make_engine("llama", role=TEACHER)
    student.compare_with({"actor": student, "teacher": teacher})
    teacher._longest = 16
    with pytest.raises(RunError, match="16"):
        student.forward(batch, ["divergence:teacher:1"])


def test_hidden_states_are_only_for_a_loss(make_engine, program, batch):
    seen = []

    def loss(part, outputs):
        seen.append(outputs["hidden"].shape)
        return LossResult((outputs["hidden"].square().mean(-1) * part["loss_weights"]).sum())

    engine = make_engine()
    metrics = program.train(engine, batch, loss, ["hidden"])
    assert seen == [(batch.token_count, 32)]
    assert metrics["gradient_norm"] > 0
    with pytest.raises(
        RunError, match="'hidden' has more than one number per token: only a loss in `train` may request it"
    ):
        engine.forward(batch, ["hidden"])


def test_engines_that_cannot_be_compared_are_refused(make_engine, program, batch):
    engine = make_engine()
    with pytest.raises(RunError, match="with the role 'teacher', which has no fsdp engine of its own"):
        engine.forward(batch, ["divergence:teacher:1"])
    engine.compare_with({"actor": engine, "reference": make_engine(role=REFERENCE)})
    assert float(engine.forward(batch, ["divergence:reference:1"])["divergence:reference:1"].abs().max()) < 1e-5
    outputs = "logprobs, entropy, top_logprobs, sum_pi_squared, hidden, topk:K, divergence:ROLE:BETA"
    with pytest.raises(RunError, match=f"computes {outputs}, not 'divergenc'"):
        engine.forward(batch, ["divergenc"])
