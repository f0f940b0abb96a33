import gc
import shutil

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from areal_core.errors import RunError
from areal_core.sdk import CRITIC, REFERENCE, LossResult
from areal_fsdp.attention.packed import packed_attention
from areal_fsdp.parallel.file_names import named_as_in_files
from areal_testing.conformance.training_session import REWARD_MODEL

KINDS = ["qwen3", "llama", "mistral", "gpt2", "qwen3_moe", "mixtral"]


def assert_close(found, wanted, tolerance=1e-6):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=0, msg=lambda text, n=name: f"{n}: {text}")


def hugging_face_outputs(folder, batch, temperature):
    """Return log-probabilities and entropy from the logits of transformers' model, one sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logprobs, entropies = [], []
    for ids, targets in zip(
        *(batch[key].split(batch.lengths.tolist()) for key in ("input_ids", "targets")), strict=True
    ):
        log_p = torch.log_softmax(model(input_ids=ids[None]).logits[0].double() / temperature, -1)
        logprobs.append(log_p.gather(1, targets[:, None])[:, 0])
        entropies.append(-(log_p.exp() * log_p).sum(-1))
    return model, {"logprobs": torch.cat(logprobs), "entropy": torch.cat(entropies)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_packed_sequences_have_the_values_and_gradients_of_single_sequences(
    kind, temperature, make_engine, model_folder, batch, program
):
    engine = make_engine(kind, temperature=temperature)
    model, wanted = hugging_face_outputs(model_folder(kind), batch, temperature)
    found = engine.forward(batch, program.OUTPUTS)
    assert_close(found, {name: value.detach().float() for name, value in wanted.items()}, 1e-4)
    program.policy_loss(batch, wanted).loss.backward()
    gradients, _ = program.gradients_of(engine, batch)
    expected = {name: p.grad for name, p in model.named_parameters()}
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-2
    scale = max(1.0, *(float(gradient.abs().max()) for gradient in expected.values()))
    assert_close(gradients, expected, 2e-5 * scale)


def test_the_gradient_does_not_depend_on_micro_batches(make_engine, program, batch):
    whole, metrics = program.gradients_of(make_engine(), batch)
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-2
    for budget in (60, 31, 30):
        gradients, other = program.gradients_of(make_engine(max_tokens_per_microbatch=budget), batch)
        assert_close(gradients, whole)
        assert other == pytest.approx(metrics, abs=1e-5)


def test_measurements_cover_the_work_since_the_last_call(make_engine, program, batch):
    engine = make_engine(max_tokens_per_microbatch=60)
    assert engine.measurements() == {}
    program.gradients_of(engine, batch)
    engine.forward(batch, program.OUTPUTS)
    found = engine.measurements()
    assert found["tokens_per_s"] * found["train_s"] == pytest.approx(batch.token_count)
    assert found["microbatches"] == -(-batch.token_count // 60)
    assert found["waste"] == 0, "one rank waits for nobody"
    assert found["tflops_per_s"] > 0
    assert found["forward_s"] > 0
    assert "peak_memory_gib" not in found, "nobody counts it on a CPU"
    assert engine.measurements() == {}


def test_the_gradient_does_not_depend_on_the_order_of_sequences(make_engine, program, batch):
    engine = make_engine()
    whole, _ = program.gradients_of(engine, batch)
    apart = [program.gradients_of(engine, batch.select(rows))[0] for rows in ([0, 2, 4, 6], [7, 5, 3, 1])]
    assert_close({name: apart[0][name] + apart[1][name] for name in whole}, whole)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "activation_memory_gib": 1e-4, "max_tokens_per_microbatch": 128},
    ],
)
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_activation_checkpointing_changes_nothing(make_engine, program, batch, kind, settings):
    plain, _ = program.gradients_of(make_engine(kind), batch)
    recomputed, _ = program.gradients_of(make_engine(kind, **settings), batch)
    assert_close(recomputed, plain, 0)


def kept_while_training(engine, program, batch):
    """Return the bytes that layers keep for the backward pass, in autograd and in checkpoints."""
    found, live = [], {}
    gc.collect()
    of_other_tests = {id(value) for value in gc.get_objects() if type(value) is torch.Tensor}

    def loss(part, outputs):
        gc.collect()
        others = {id(p) for p in engine._module.parameters()} | of_other_tests
        for value in gc.get_objects():  # what selective checkpoints hold, no hook sees
            if type(value) is torch.Tensor and id(value) not in others:
                live[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        for pointer in [p.data_ptr() for p in engine._module.parameters()]:
            live.pop(pointer, None)
        found.append(sum(live.values()))
        return program.policy_loss(part, outputs)

    def keep(tensor):
        live[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        program.gradients_of(engine, batch, loss)
    return found[0]


@pytest.mark.slow
def test_each_kind_of_checkpointing_keeps_less(make_engine, program):
    batch = program.make_batch(lengths=(64,) * 8)
    selective = {"activation_checkpointing": "selective", "max_tokens_per_microbatch": 512}
    settings = {
        "none": {},
        "selective": selective,
        "budget": {**selective, "activation_memory_gib": 0.7 / 1024},
        "full": {"activation_checkpointing": "full"},
    }
    kept = {name: kept_while_training(make_engine("llama", **how), program, batch) for name, how in settings.items()}
    assert kept["full"] < kept["budget"] < kept["selective"] < kept["none"], kept


def test_an_activation_budget_for_unknown_layers_is_refused(make_engine):
    make_engine("gpt2", activation_checkpointing="selective")
    with pytest.raises(RunError, match="activations of this model's layers are not known"):
        make_engine("gpt2", activation_checkpointing="selective", activation_memory_gib=1)


def test_training_raises_the_probability_of_rewarded_tokens(make_engine, program, batch):
    engine = make_engine(learning_rate=1e-2)

    def likelihood(part, outputs):
        return LossResult(-(outputs["logprobs"] * part["loss_weights"]).sum())

    losses = [program.train(engine, batch, likelihood, ["logprobs"]) for _ in range(30)]
    assert losses[-1]["loss"] < 0.5 * losses[0]["loss"]
    assert losses[0]["skipped"] == 0
    assert losses[0]["learning_rate"] == 1e-2


def test_non_finite_gradients_are_skipped(make_engine, program, batch):
    engine = make_engine(warmup_steps=10)
    before = program.parameters_of(engine)
    metrics = program.train(engine, batch, lambda part, outputs: LossResult(outputs["logprobs"].sum() * torch.inf))
    assert metrics["skipped"] == 1
    assert_close(program.parameters_of(engine), before, 0)
    metrics = program.train(engine, batch)
    assert metrics["skipped"] == 0
    assert metrics["learning_rate"] == pytest.approx(2e-4), "the schedule counts the skipped one too"


def test_empty_batch_and_loss_without_gradients(make_engine, program, batch):
    engine = make_engine()
    before = program.parameters_of(engine)
    metrics = program.train(engine, batch.select([]))
    assert metrics == {"loss": 0.0, "gradient_norm": 0.0, "learning_rate": 1e-3, "skipped": 0.0}
    assert engine.forward(batch.select([]), ["logprobs"])["logprobs"].shape == (0,)
    metrics = program.train(engine, batch, lambda part, outputs: LossResult(torch.tensor(2.0)))
    assert metrics["loss"] == 2
    assert metrics["gradient_norm"] == 0
    assert_close(program.parameters_of(engine), before, 0)


def test_checkpoint_continues_bit_for_bit(make_engine, program, batch, tmp_path):
    settings = {"warmup_steps": 3, "schedule": "cosine", "weight_decay": 0.1}
    engine = make_engine(**settings)
    engine.save(tmp_path / "start")
    for _ in range(2):
        program.train(engine, batch)
    engine.save(tmp_path / "two")
    noise = torch.rand(3)
    first = [program.train(engine, batch) for _ in range(2)]
    wanted = program.parameters_of(engine)
    other = make_engine(**settings)
    other.load(tmp_path / "two")
    assert torch.equal(torch.rand(3), noise)
    assert [program.train(other, batch) for _ in range(2)] == first
    assert_close(program.parameters_of(other), wanted, 0)
    other.load(tmp_path / "start")
    assert program.train(other, batch)["learning_rate"] == pytest.approx(1e-3 / 3)


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_with_transformers(kind, make_engine, program, batch, model_folder, tmp_path):
    engine = make_engine(kind)
    program.train(engine, batch)
    engine.export(tmp_path / "best")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "best")
    wanted = named_as_in_files(model, ((name, p.detach()) for name, p in model.named_parameters()))
    assert_close(program.parameters_of(engine), dict(wanted), 0)
    again = make_engine(tmp_path / "best")
    assert_close(again.forward(batch, ["logprobs"]), engine.forward(batch, ["logprobs"]), 0)


def test_an_export_contains_the_tokenizer(make_engine, model_folder, tmp_path):
    words = {"[UNK]": 0, "sum": 1, "is": 2}
    source = tmp_path / "source"
    shutil.copytree(model_folder(), source)
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "[UNK]")), unk_token="[UNK]", chat_template="{{ messages }}"
    ).save_pretrained(source)
    make_engine(source).export(tmp_path / "export")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.get_vocab() == words
    assert tokenizer.chat_template == "{{ messages }}"


def test_parameters_have_the_names_of_the_files(make_engine, model_folder):
    from safetensors import safe_open

    for kind in KINDS:
        with safe_open(model_folder(kind) / "model.safetensors", "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        assert {name: tuple(tensor.shape) for name, tensor in make_engine(kind).named_full_parameters()} == shapes


def test_bfloat16_keeps_float32_masters(make_engine, program, batch, tmp_path):
    engine = make_engine(dtype="bfloat16", learning_rate=1e-6)
    assert {p.dtype for p in engine._parameters.values()} == {torch.float32}
    before = {name: p.detach().clone() for name, p in engine._parameters.items()}
    metrics = program.train(engine, batch)
    assert metrics["skipped"] == 0
    changed = [name for name, p in engine._parameters.items() if not torch.equal(p, before[name])]
    assert len(changed) == len(before)
    assert {tensor.dtype for _, tensor in engine.named_full_parameters()} == {torch.bfloat16}
    exact = make_engine().forward(batch, ["logprobs"])["logprobs"]
    assert (engine.forward(batch, ["logprobs"])["logprobs"] - exact).abs().mean() < 0.1
    engine.export(tmp_path / "half")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16


def test_reference_is_frozen(make_engine, program, batch):
    engine = make_engine(role=REFERENCE)
    assert_close(engine.forward(batch, program.OUTPUTS), make_engine().forward(batch, program.OUTPUTS), 0)
    with pytest.raises(RunError, match="frozen"):
        program.train(engine, batch)
    assert not any(p.requires_grad for p in engine._parameters.values())


@pytest.mark.slow
def test_critic_learns_and_its_export_is_a_reward_model(make_engine, program, batch, tmp_path):
    critic = make_engine(role=CRITIC, learning_rate=3e-3, max_tokens_per_microbatch=40)
    goal = torch.linspace(-1, 1, batch.token_count)
    batch = batch.with_tokens(returns=goal)

    def squared(part, outputs):
        return LossResult((outputs["values"] - part["returns"]).square().sum() / len(goal))

    losses = [program.train(critic, batch, squared, ["values"])["loss"] for _ in range(40)]
    assert losses[-1] < 0.5 * losses[0]
    values = critic.forward(batch, ["values"])
    critic.export(tmp_path / "value")
    reward = make_engine(tmp_path / "value", role=REWARD_MODEL)
    assert_close(reward.forward(batch, ["values"]), values, 1e-5)
    with pytest.raises(RunError, match="computes values"):
        reward.forward(batch, ["logprobs"])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "value").eval()
    model.config.pad_token_id = 0
    last = batch.tokens.offsets[1:] - 1
    ids = batch["input_ids"].split(batch.lengths.tolist())
    scores = torch.cat([model(input_ids=row[None], attention_mask=torch.ones_like(row)[None]).logits[0] for row in ids])
    rows = torch.tensor([bool(row[-1] != 0) for row in ids])
    torch.testing.assert_close(values["values"][last][rows], scores.detach()[rows], atol=1e-5, rtol=0)


def test_a_new_critic_is_the_same_every_time(make_engine, batch):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(make_engine(role=CRITIC).forward(batch, ["values"]))
        assert torch.initial_seed() == seed
    assert_close(found[0], found[1], 0)


def test_reward_model_without_a_head_is_refused(make_engine):
    with pytest.raises(RunError, match=r"lacks weights that a scalar head needs: score\.weight"):
        make_engine(role=REWARD_MODEL)


def test_unreadable_models_are_refused(make_engine, tmp_path, model_folder):
    with pytest.raises(RunError, match=r"no config\.json"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_text((model_folder() / "config.json").read_text())
    with pytest.raises(RunError, match="cannot be loaded"):
        make_engine(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(RunError, match="cannot be loaded"):
        make_engine(tmp_path)


def test_sequences_longer_than_the_model_s_positions_are_refused(make_engine, program):
    long = program.make_batch(lengths=(5, 65))
    with pytest.raises(RunError, match="65 tokens is beyond the model's max_position_embeddings of 64"):
        make_engine().forward(long, ["logprobs"])


def test_a_sequence_over_the_budget_does_not_change_the_gradient(make_engine, program):
    batch = program.make_batch(lengths=(5, 60))
    whole, _ = program.gradients_of(make_engine(), batch)
    alone, _ = program.gradients_of(make_engine(max_tokens_per_microbatch=50), batch)
    assert_close(alone, whole)


def test_a_head_that_is_not_linear_is_refused(make_engine, monkeypatch):
    original = torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda self, x: original(self, x) * (1.01 if self.out_features == 62 else 1)
    )
    with pytest.raises(RunError, match=r"model type 'qwen3': packed: a probe differs.*rows: a probe differs"):
        make_engine()


def test_packed_attention_that_mixes_sequences_is_not_used(make_engine, monkeypatch):
    def leaky(query, key, value, layout, **options):
        return packed_attention(query, key, value, type(layout).from_lengths([len(query)]), **options)

    monkeypatch.setattr("areal_fsdp.attention.hugging_face.packed_attention", leaky)
    assert make_engine("llama")._module.in_rows


def test_close_can_be_called_twice(make_engine, batch):
    engine = make_engine()
    engine.close()
    engine.close()
    with pytest.raises(RunError, match="call setup first"):
        engine.forward(batch, ["logprobs"])


def test_a_missing_checkpoint_is_refused(make_engine, tmp_path):
    with pytest.raises(RunError, match="cannot be loaded"):
        make_engine().load(tmp_path / "nothing")
    reference = make_engine(role=REFERENCE)
    reference.save(tmp_path / "frozen")
    with pytest.raises(RunError, match="cannot be loaded"):
        make_engine().load(tmp_path / "frozen")


def test_degrees_that_do_not_fit_the_ranks_are_refused_at_setup(make_engine):
    from areal_core.errors import RunError

    with pytest.raises(RunError, match="does not give the 1 ranks"):
        make_engine(parallel={"tensor": 2})


def test_the_token_budget_is_per_rank_of_context():
    from areal_fsdp.config import FSDPConfig

    assert FSDPConfig(max_tokens_per_microbatch=100, parallel={"context": 4}).tokens_at_once == 400


def test_a_token_outside_the_vocabulary_is_refused(make_engine, batch):
    engine = make_engine()
    batch["input_ids"][3] = engine._module.model.config.vocab_size
    with pytest.raises(RunError, match=r"a batch has the token \d+, but the model's vocabulary has"):
        engine.forward(batch, ["logprobs"])
