"""Routing replay: tokens go through the experts that generated them, weighted by the model's own probabilities."""

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import AutoModelForCausalLM

from areal_core.data import PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.models.experts import MODEL_TYPES, MoEShape
from areal_core.sdk import CRITIC, REFERENCE
from areal_fsdp.models import compiling

KINDS = ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"]


def own_choices(folder, batch):
    """Return the choices of transformers' model, [T, layers, choices] counted from 1, at the routed positions."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found = []
    with torch.no_grad():
        for ids in batch["input_ids"].split(batch.lengths.tolist()):
            logits = model(input_ids=ids[None], output_router_logits=True).router_logits
            found.append(torch.stack([each.softmax(-1).topk(2).indices for each in logits], 1))
    return (torch.cat(found) + 1).to(torch.uint8)


def test_the_tested_models_have_supported_routers():
    assert sorted(KINDS) == sorted(MODEL_TYPES)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "full", "max_tokens_per_microbatch": 40}])
def test_replaying_the_model_s_own_choices_changes_no_bit(make_engine, program, batch, model_folder, kind, settings):
    engine = make_engine(kind, router_loss=0.3, **settings)
    chosen = batch.with_tokens(routed_experts=own_choices(model_folder(kind), batch))
    wanted, metrics = program.gradients_of(engine, batch)
    found, replayed = program.gradients_of(engine, chosen)
    assert replayed.pop("router_disagreement") == 0
    assert replayed == metrics
    for name, gradient in wanted.items():
        assert torch.equal(found[name], gradient), name
    plain, again = (engine.forward(each, program.OUTPUTS) for each in (batch, chosen))
    assert all(torch.equal(plain[name], again[name]) for name in plain)


@pytest.mark.parametrize("kind", KINDS)
def test_replayed_experts_are_used_and_the_router_gets_gradients(make_engine, program, batch, kind, model_folder):
    """Compare with transformers' model whose routers return these choices, weighted by their probabilities."""
    engine = make_engine(kind, temperature=0.8)
    chosen = program.with_choices(engine, batch)
    model = AutoModelForCausalLM.from_pretrained(model_folder(kind), dtype=torch.float32, attn_implementation="eager")
    routers = [module for module in model.eval().modules() if type(module).__name__.endswith("TopKRouter")]
    loss = torch.zeros(())
    columns = ["input_ids", "targets", "advantages", "loss_weights", "routed_experts"]
    for *parts, experts in zip(*(chosen[name].split(batch.lengths.tolist()) for name in columns), strict=True):
        hooks = [
            router.register_forward_hook(lambda own, _, out, e=experts[:, place]: forced(own, out, e))
            for place, router in enumerate(routers)
        ]
        ids, targets, advantages, weights = parts
        logprobs = (model(input_ids=ids[None]).logits[0] / 0.8).log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        taken = logprobs.gather(1, targets[:, None])[:, 0]
        loss = loss + (weights * (-advantages * taken - 0.1 * entropy)).sum()
        for hook in hooks:
            hook.remove()
    loss.backward()
    found, metrics = program.gradients_of(engine, chosen)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), abs=1e-5)
    learned = [name for name in found if name.endswith("gate.weight")]
    assert min(float(found[name].abs().max()) for name in learned) > 1e-4
    for name, parameter in model.named_parameters():
        true = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[name], true, atol=2e-5, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def forced(router, output, experts):
    """Return the output of a router that must choose these experts."""
    logits, scores, own = output
    chosen = torch.where(experts > 0, experts.long() - 1, own)
    weights = logits.softmax(-1, dtype=torch.float32)[torch.arange(len(chosen))[:, None], chosen]
    if getattr(router, "norm_topk_prob", True):
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights.to(scores.dtype), chosen


def test_sequences_without_choices_are_not_replayed(make_engine, program, batch):
    engine = make_engine("qwen3_moe")
    missing = [1, 4, 7]
    own, all_chosen, mixed = (
        engine.forward(each, ["logprobs"])["logprobs"].split(batch.lengths.tolist())
        for each in (batch, program.with_choices(engine, batch), program.with_choices(engine, batch, missing))
    )
    for row, length in enumerate(batch.lengths.tolist()):
        torch.testing.assert_close(mixed[row], (own if row in missing else all_chosen)[row], atol=1e-5, rtol=0)
        assert length < 3 or not torch.allclose(own[row], all_chosen[row], atol=1e-3)


def test_router_disagreement_is_the_share_of_replaced_choices(make_engine, program, batch, model_folder):
    engine = make_engine("mixtral")
    chosen = program.with_choices(engine, batch, missing=[3])
    drawn = chosen["routed_experts"]
    # Of the first layer alone, whose inputs no replay has changed; the others go through their own choices.
    first = drawn.clone()
    first[:, 1:] = 0
    metrics = program.train(engine, batch.with_tokens(routed_experts=first))
    own = own_choices(model_folder("mixtral"), batch)[:, 0]
    replayed = first[:, 0] > 0
    differs = ~(own[:, :, None] == first[:, 0, None, :]).any(-1) & replayed
    assert metrics["router_disagreement"] == pytest.approx(float(differs.sum() / replayed.sum()), abs=1e-6)
    assert 0.1 < metrics["router_disagreement"] < 0.9
    assert "router_disagreement" not in program.train(engine, batch)


@pytest.mark.parametrize("role", [REFERENCE, CRITIC])
def test_other_roles_do_not_replay(make_engine, program, batch, role):
    actor, other = make_engine("qwen3_moe"), make_engine("qwen3_moe", role=role)
    outputs = ["values"] if role is CRITIC else program.OUTPUTS
    chosen = program.with_choices(actor, batch)
    plain, replayed = (other.forward(each, outputs) for each in (batch, chosen))
    assert all(torch.equal(plain[name], replayed[name]) for name in outputs)


def test_a_reference_from_the_base_does_not_replay(make_engine, program, batch, model_folder):
    """It shares the policy's routers, and computes between the policy's passes."""
    actor = make_engine("mixtral", adapter={"rank": 2, "modules": ["q_proj", "v_proj"]})
    base = actor.reference_from_base(ModelReference(str(model_folder("mixtral"))), REFERENCE)
    chosen = program.with_choices(actor, batch)
    wanted = base.forward(batch, ["logprobs"])["logprobs"]
    replayed = actor.forward(chosen, ["logprobs"])["logprobs"]
    assert torch.equal(base.forward(chosen, ["logprobs"])["logprobs"], wanted)
    assert not torch.allclose(replayed, wanted, atol=1e-3)
    assert torch.equal(actor.forward(chosen, ["logprobs"])["logprobs"], replayed)


def test_a_compared_model_does_not_replay(make_engine, program, batch):
    actor, other = make_engine("mixtral"), make_engine("mixtral", role=REFERENCE)
    actor.compare_with({REFERENCE.name: other})
    name = f"divergence:{REFERENCE.name}:0"
    apart = actor.forward(program.with_choices(actor, batch), [name])[name]
    assert float(apart.abs().max()) > 1e-3
    assert float(actor.forward(batch, [name])[name].abs().max()) < 1e-5


def test_choices_that_do_not_fit_the_routers_are_refused(make_engine, program, batch):
    engine = make_engine("mixtral")
    chosen = program.with_choices(engine, batch)["routed_experts"]
    for wrong in (chosen[:, :1], chosen[..., :1], chosen + 3):
        with pytest.raises(RunError, match=r"the model has 2 of 4 experts in each of 2 layers") as caught:
            engine.forward(batch.with_tokens(routed_experts=wrong), ["logprobs"])
        assert "generate with the trained model" in caught.value.hints[0]
    with pytest.raises(RunError, match="the model has 0 of 0 experts in each of 0 layers"):
        program.train(make_engine("qwen3"), batch.with_tokens(routed_experts=chosen))


def test_the_layers_with_experts_are_read_from_the_config(model_folder, make_engine):
    for kind in KINDS:
        routing = make_engine(kind)._routing
        found = MoEShape.of(make_engine(kind)._module.model.config.to_dict())
        routers = routing._routers
        assert (found.shape, found.experts) == ((len(routers), routers[0].top_k), routers[0].num_experts)
    assert MoEShape.of({**MOE, "mlp_only_layers": [1]}).layers == (0, 2, 3)
    assert MoEShape.of({**MOE, "decoder_sparse_step": 2}).layers == (1, 3)
    assert [MoEShape.of({**MOE, "num_experts": n}).dtype for n in (255, 256)] == ["uint8", "int16"]
    with pytest.raises(RunError, match="model type deepseek_v3 has no routers whose choices are known"):
        MoEShape.of({**MOE, "model_type": "deepseek_v3"})


MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2}


def test_a_shifted_batch_has_choices_at_the_tokens_that_made_them(program, batch):
    """Servers send a token's experts with the token that it predicts; the last position has none."""
    experts = torch.arange(1, batch.token_count + 1, dtype=torch.uint8)[:, None, None]
    experts[batch.tokens.offsets[:-1]] = 0
    tokens = {"input_ids": batch["input_ids"], "routed_experts": experts}
    shifted = shift_to_predictions(PackedBatch(Ragged(batch.lengths, tokens)))["routed_experts"].flatten()
    last = batch.tokens.offsets[1:] - 1
    assert not shifted[last].any()
    before = torch.ones(batch.token_count, dtype=torch.bool)
    before[last] = False
    assert torch.equal(shifted[before].long(), torch.arange(2, batch.token_count + 2)[before])


@pytest.mark.nightly
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_layers_replay_without_recompilation(make_engine, program, monkeypatch, recompute):
    monkeypatch.setattr(compiling, "BACKEND", "aot_eager")
    torch._dynamo.reset()
    eager = make_engine("qwen3_moe", router_loss=0.5)
    compiled = make_engine("qwen3_moe", router_loss=0.5, compile=True, activation_checkpointing=recompute)
    graphs = 0
    for lengths in [(9, 30, 3), (40,), (3,) * 11]:
        batch = program.with_choices(eager, program.make_batch(lengths))
        outputs = [engine.forward(batch, ["logprobs"])["logprobs"] for engine in (eager, compiled)]
        torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
        wanted, metrics = program.gradients_of(eager, batch)
        found, others = program.gradients_of(compiled, batch)
        assert others == pytest.approx(metrics, abs=1e-5)
        for name, gradient in wanted.items():
            scale = max(1.0, float(gradient.abs().max()))
            torch.testing.assert_close(found[name], gradient, atol=1e-5 * scale, rtol=0)
        graphs = graphs or counters["stats"]["unique_graphs"]
        assert counters["stats"]["unique_graphs"] == graphs
    torch._dynamo.reset()
