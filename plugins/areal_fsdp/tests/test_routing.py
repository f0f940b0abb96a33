"""Metrics and load-balancing loss of an MoE's routers equal a plain computation."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from areal_core.errors import RunError
from areal_core.sdk import LossResult
from areal_fsdp.models import compiling
from areal_fsdp.planning.split import Split


def zero_loss(part, outputs):
    return LossResult(outputs["logprobs"].sum() * 0.0)


def plain_balance(folder, batch):
    """Return a model, and eq. 4 of Switch Transformer for each sequence, weighted by tokens and summed over layers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    total = torch.zeros(())
    for ids in batch["input_ids"].split(batch.lengths.tolist()):
        for logits in model(input_ids=ids[None], output_router_logits=True).router_logits:
            chance = logits.softmax(-1)
            experts = chance.shape[-1]
            picked = torch.nn.functional.one_hot(chance.topk(2).indices, experts).sum(1).float()
            share = picked.mean(0) / 2
            total = total + experts * (share * chance.mean(0)).sum() * len(ids) / batch.token_count
    return model, total


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize(
    "settings",
    [{}, {"max_tokens_per_microbatch": 31}, {"activation_checkpointing": "full", "max_tokens_per_microbatch": 40}],
)
def test_the_loss_is_computed_per_sequence_in_any_micro_batches(
    make_engine, program, batch, model_folder, kind, settings
):
    model, wanted = plain_balance(model_folder(kind), batch)
    (0.5 * wanted).backward()
    engine = make_engine(kind, router_loss=0.5, **settings)
    found, metrics = program.gradients_of(engine, batch, zero_loss, ["logprobs"])
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert max(float(g.abs().max()) for g in expected.values() if g is not None) > 1e-3
    for name, gradient in found.items():
        true = torch.zeros_like(gradient) if expected[name] is None else expected[name]
        torch.testing.assert_close(gradient, true, atol=1e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")
    layers = len(engine._routing._routers)
    assert metrics["router_balance"] == pytest.approx(float(wanted.detach()) / layers, abs=1e-5)


def test_metrics_show_the_use_of_experts(make_engine, program, batch, model_folder):
    engine = make_engine("mixtral")
    metrics = program.train(engine, batch)
    model = AutoModelForCausalLM.from_pretrained(model_folder("mixtral"), dtype=torch.float32)
    counts, entropies = [torch.zeros(4) for _ in range(2)], []
    for ids in batch["input_ids"].split(batch.lengths.tolist()):
        for number, logits in enumerate(model(input_ids=ids[None], output_router_logits=True).router_logits):
            chance = logits.softmax(-1)
            counts[number] += torch.bincount(chance.topk(2).indices.flatten(), minlength=4)
            entropies.append(-(chance * chance.log()).sum(-1))
    loads = [float(each.max() / each.mean()) for each in counts]
    assert metrics["router_load_max"] == pytest.approx(max(loads))
    assert metrics["router_load"] == pytest.approx(sum(loads) / 2)
    entropy = float(torch.cat(entropies).mean() / torch.tensor(4.0).log())
    assert metrics["router_entropy"] == pytest.approx(entropy, abs=1e-5)
    again = program.train(engine, batch.select([1]))
    assert again["router_load"] != metrics["router_load"], "of the last update alone"


def test_dummy_micro_batches_do_not_count(make_engine, program, batch, monkeypatch):
    """A rank with fewer micro-batches than others computes the shortest sequence again."""
    engine, again = (make_engine("mixtral", router_loss=0.5) for _ in range(2))
    monkeypatch.setattr(Split, "rows_by_round", lambda split: [(split.microbatches[0], True), (split.dummy, False)])
    found, metrics = program.gradients_of(engine, batch, zero_loss, ["logprobs"])
    monkeypatch.undo()
    wanted, expected = program.gradients_of(again, batch, zero_loss, ["logprobs"])
    for name in ("router_load", "router_load_max", "router_entropy", "router_balance"):
        assert metrics[name] == expected[name], name
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())


def test_a_dense_model_has_no_routers(make_engine, program, batch):
    assert not {name for name in program.train(make_engine(), batch) if name.startswith("router")}
    with pytest.raises(RunError, match="no supported routers") as caught:
        make_engine(router_loss=0.1)
    assert caught.value.hints == ("set train_engine.router_loss to 0",)


def test_the_loss_balances_the_experts(make_engine, program, batch):
    engine = make_engine("mixtral", router_loss=1.0, learning_rate=1e-2)
    balance = [program.train(engine, batch, zero_loss, ["logprobs"])["router_balance"] for _ in range(12)]
    assert balance[-1] - 1 < 0.8 * (balance[0] - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "recompute", ["selective", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("none", "full"))]
)
def test_compiled_routers_need_no_recompilation_for_metrics(make_engine, program, monkeypatch, recompute):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    eager = make_engine("qwen3_moe", router_loss=0.5)
    compiled = make_engine("qwen3_moe", router_loss=0.5, compile=True, activation_checkpointing=recompute)
    graphs = 0
    for lengths in [(9, 30, 3), (40,), (3,) * 11]:
        batch = program.make_batch(lengths)
        wanted, metrics = program.gradients_of(eager, batch)
        found, others = program.gradients_of(compiled, batch)
        assert others == pytest.approx(metrics, abs=1e-5)
        for name, gradient in wanted.items():
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale, rtol=0)
        graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()
