"""The loss and the replay of routers on each rung, against transformers' model, which computes each sequence alone."""

import pytest
import small_models
import torch

from areal_core.errors import RunError
from areal_core.models.experts import ROUTED_EXPERTS
from areal_fsdp.models.routing import ROUTERS

WEIGHT = 0.5
RUNGS = {
    "qwen3_next": "mixers",
    "minimax": "mixers",
    "qwen3_5_moe_text": "mixers",
    "gpt_oss": "packed",
    "flex_olmo": "packed",
    "qwen3_moe": "packed",
}
FAST = ("qwen3_next", "gpt_oss")
EVERY = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in RUNGS]


def routers_of(model):
    return [module for module in model.modules() if type(module).__name__ in ROUTERS]


def with_balance(model, batch):
    """The gradients of the weighted sum and of the balance loss of each sequence, and the choices [T, layers, K]."""
    seen, total = [], batch.token_count
    for router in routers_of(model):
        router.register_forward_hook(lambda _, inputs, output: seen.append(output))
    choices = []
    columns = (batch[name].split(small_models.LENGTHS) for name in ("input_ids", "targets", "weights"))
    for ids, targets, weights in zip(*columns, strict=True):
        seen.clear()
        logprobs = torch.log_softmax(model(input_ids=ids[None], use_cache=False).logits[0].float(), -1)
        loss = (logprobs.gather(1, targets[:, None])[:, 0] * weights).sum()
        for logits, _, chosen in seen:
            experts = logits.shape[-1]
            share = torch.nn.functional.one_hot(chosen, experts).sum((0, 1)) / chosen.numel()
            balance = experts * (share * torch.softmax(logits.float(), -1).mean(0)).sum()
            loss = loss + WEIGHT * balance * len(ids) / total
        loss.backward()
        choices.append(torch.stack([chosen for _, _, chosen in seen], 1))
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return gradients, torch.cat(choices)


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_the_router_loss_is_that_of_each_sequence_alone(family, in_rows, tmp_path, monkeypatch):
    small_models.make_model(family, tmp_path)
    batch = small_models.make_batch()
    wanted, choices = with_balance(small_models.load(tmp_path), batch)
    engine = small_models.set_up(tmp_path, router_loss=WEIGHT)
    assert engine._choice.rung == RUNGS[family]
    if in_rows:
        engine._module.attend_by("eager")
    monkeypatch.setattr(engine._routing, "metrics", dict)  # it would set the counts to 0
    found = small_models.gradients(engine, batch)
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) / largest < small_models.GRADIENT_TOLERANCE, name
    counts = torch.stack([router.found[:-5] for router in engine._routing._routers])
    expected = [torch.bincount(layer.flatten(), minlength=counts.shape[1]) for layer in choices.unbind(1)]
    assert torch.equal(counts, torch.stack(expected).float()), "padding is counted, or a token is not"


@pytest.mark.parametrize("in_rows", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_replayed_choices_reach_their_own_tokens(family, in_rows, tmp_path):
    """Replay of what each sequence chooses alone changes nothing, and of other choices what these compute."""
    small_models.make_model(family, tmp_path)
    batch = small_models.make_batch()
    _, choices = with_balance(small_models.load(tmp_path), batch)
    engine = small_models.set_up(tmp_path)
    wanted, wanted_gradients = engine.forward(batch, ["logprobs"])["logprobs"], small_models.gradients(engine, batch)
    if in_rows:
        engine._module.attend_by("eager")
    own = batch.with_tokens(**{ROUTED_EXPERTS: (choices + 1).to(torch.uint8)})
    assert small_models.distance(engine.forward(own, ["logprobs"])["logprobs"], wanted) < small_models.TOLERANCE
    found = small_models.gradients(engine, own)
    largest = max(float(gradient.abs().max()) for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        assert float((found[name] - gradient).abs().max()) / largest < small_models.GRADIENT_TOLERANCE, name
    experts = engine._routing._routers[0].num_experts
    others = (choices + 1) % experts
    other = batch.with_tokens(**{ROUTED_EXPERTS: (others + 1).to(torch.uint8)})
    values = engine.forward(other, ["logprobs"])["logprobs"]
    assert small_models.distance(values, wanted) > 100 * small_models.TOLERANCE
    assert small_models.distance(values, replayed(tmp_path, batch, others)) < small_models.TOLERANCE


def replayed(folder, batch, choices):
    """Log-probabilities of transformers' model, whose routers take these choices [T, layers, K]."""
    model = small_models.load(folder)
    layers = [iter(layer.split(small_models.LENGTHS)) for layer in choices.unbind(1)]
    for router, parts in zip(routers_of(model), layers, strict=True):

        def replay(module, inputs, output, parts=parts):
            logits, scores, _ = output
            chosen = next(parts)
            own = torch.softmax(logits.float(), -1).gather(1, chosen)
            norms = getattr(module, "norm_topk_prob", True)
            return logits, (own / own.sum(-1, keepdim=True) if norms else own).to(scores.dtype), chosen

        router.register_forward_hook(replay)
    return small_models.reference_of(model, batch)[0]


def test_a_loss_of_routers_that_are_not_known_is_refused(tmp_path):
    small_models.make_model("deepseek_v3", tmp_path)
    with pytest.raises(RunError, match="model type deepseek_v3 has no supported routers"):
        small_models.set_up(tmp_path, router_loss=WEIGHT)
