"""Log-probabilities given the teacher's prompt: positions against loops, numbers against transformers."""

import hashlib

import numpy as np
import pytest
import torch

from areal_core.config import roles_of, select
from areal_core.config.sections import TrainingSection
from areal_core.data import FinishReason, Generation, PackedBatch, TrajectoryBuilder, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import PolicyTerms
from areal_core.training.context import BatchContext
from areal_finetuning.distillation import distillation
from areal_finetuning.self_teacher import self_teacher
from areal_testing.conformance import make_model
from areal_testing.fakes import FakeContext

VOCABULARY = 61
ROWS = [
    # prompt, answer, the teacher's prompt
    ([5, 6, 7], [8, 9], [1, 2, 3, 4]),
    ([5], [8, 9, 10, 11], []),
    ([5, 6], [], [1, 2]),
    ([3, 3, 3, 3, 3, 3], [12], [9]),
    ([3, 4], [12, 12, 13], [12, 12, 13]),
]


def trajectory(prompt, answer, teacher):
    builder = TrajectoryBuilder()
    builder.add_context(prompt)
    builder.add_generation(Generation(answer, [-0.5] * len(answer), [0] * len(answer), FinishReason.STOP))
    return builder.build(multimodal={"teacher": {"teacher_prompt_ids": np.array(teacher, np.int64)}})


def make_batch(rows=ROWS, **columns):
    """Return a batch as a segment's bytes give it to the trainer, shifted, in which the policy has proximal values."""
    packed = PackedBatch.from_trajectories([trajectory(*row) for row in rows])
    batch = shift_to_predictions(PackedBatch.from_bytes(packed.to_bytes()))
    proximal = -0.01 * torch.arange(batch.token_count, dtype=torch.float32)
    number = torch.arange(len(batch))
    batch = batch.with_sequences(group_id=number // 2, episode_id=number, **columns)
    return batch.with_tokens(proximal_logprobs=proximal)


def of_prefix(ids):
    """Return a number that depends on every token of a list and their order, exact in float32."""
    return -int.from_bytes(hashlib.sha256(bytes(ids)).digest()[:2], "little") / 4096


def by_prefix(role, batch, outputs):
    """Return as a log-probability a number of the whole text up to the token."""
    assert (role, list(outputs)) == ("self_teacher", ["logprobs"])
    values = []
    for ids in torch.split(batch["input_ids"], batch.lengths.tolist()):
        listed = ids.tolist()
        values += [of_prefix(listed[: place + 2]) for place in range(len(listed) - 1)] + [0.0]
    return {"logprobs": torch.tensor(values)}


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 2]])
def test_each_token_has_the_value_of_the_teachers_text_up_to_it(order):
    batch = make_batch().select(order)
    batch = batch.with_tokens(loss_mask=batch["loss_mask"] & (batch["targets"] != 9))
    context = FakeContext(by_prefix)
    found = self_teacher(batch, context, ema_decay=0.5)["teacher_logprobs"]
    assert found.dtype == torch.float32
    wanted = batch["proximal_logprobs"].tolist()
    for row, start in zip(order, batch.tokens.offsets.tolist(), strict=False):
        prompt, answer, teacher = ROWS[row]
        for place in range(len(answer)):
            if teacher:
                wanted[start + len(prompt) - 1 + place] = of_prefix([*teacher, *answer[: place + 1]])
    assert found.tolist() == pytest.approx(wanted, abs=0)
    shares = context.metrics["teacher_share"].as_numbers("share")
    assert shares == {"share": pytest.approx(sum(bool(ROWS[row][2]) for row in order) / len(order))}


def test_without_a_prompt_the_teacher_is_the_policy_and_no_pass_is_made():
    def refuse(*arguments):
        raise AssertionError(f"a pass over {arguments}")

    batch = make_batch([(prompt, answer, []) for prompt, answer, _ in ROWS])
    found = self_teacher(batch, FakeContext(refuse), ema_decay=None)["teacher_logprobs"]
    assert torch.equal(found, batch["proximal_logprobs"])


def test_a_batch_of_another_workflow_and_several_turns_are_refused():
    batch = make_batch()
    batch.multimodal.clear()
    with pytest.raises(KeyError, match=r"no prompts of a teacher .* set workflow: finetuning/self_distillation"):
        self_teacher(batch, FakeContext(by_prefix), ema_decay=0.5)
    builder = TrajectoryBuilder()
    for _ in range(2):
        builder.add_context([5])
        builder.add_generation(Generation([7], [-0.5], [0], FinishReason.STOP))
    two = builder.build(multimodal={"teacher": {"teacher_prompt_ids": np.array([1], np.int64)}})
    shifted = shift_to_predictions(PackedBatch.from_trajectories([two])).with_tokens(proximal_logprobs=torch.zeros(4))
    with pytest.raises(RunError, match="a sequence has several turns"):
        self_teacher(shifted, FakeContext(by_prefix), ema_decay=0.5)


def test_the_expected_gradient_is_that_of_the_reverse_kl_given_the_teachers_prompt(build):
    """Over a whole vocabulary, each token as often as the policy writes it, by automatic differentiation."""
    generator = torch.Generator().manual_seed(8)
    logits, of_teacher = (2 * torch.randn(17, generator=generator, dtype=torch.float64) for _ in range(2))
    logits.requires_grad_()
    policy, teacher = torch.log_softmax(logits, -1), torch.log_softmax(of_teacher, -1)
    (wanted,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    # 17 sequences of one sampled token: each token of the vocabulary once, given the same prompts.
    batch = make_batch([([5], [token], [1, 2]) for token in range(17)])
    spread = {"proximal_logprobs": torch.stack([policy.detach(), torch.zeros(17, dtype=torch.float64)], 1).flatten()}
    zeros = torch.zeros(17, dtype=torch.float64)
    values = torch.stack([zeros, teacher, zeros], 1).flatten()  # of a prompt of two tokens and the answer
    context = FakeContext(lambda role, part, outputs: {"logprobs": values})
    batch = batch.with_tokens(**spread)
    batch = batch.with_columns(self_teacher(batch, context, ema_decay=None))
    advantages = build("advantages", "self_distillation")(batch)
    first = batch["loss_mask"]
    same = batch["proximal_logprobs"]
    logprobs = torch.stack([policy, zeros], 1).flatten()
    columns = {"teacher_logprobs": batch["teacher_logprobs"]}
    terms = PolicyTerms(logprobs, same, same, advantages, first, batch.tokens.row_index, 17, columns=columns)
    losses, logged = distillation(terms)
    (found,) = torch.autograd.grad((policy.detach().exp() * losses[first]).sum(), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    divergence = float((policy.exp() * (policy - teacher)).sum().detach())
    assert float((policy.exp() * logged["teacher_kl"][first]).sum().detach()) == pytest.approx(divergence)


@pytest.mark.parametrize("weight", [0.0, 0.25, 1.0])
def test_rewards_are_mixed_in(weight, build):
    batch = make_batch(reward=torch.tensor([1.0, 0.0, 0.5, 0.5, 1.0]))
    batch = batch.with_tokens(teacher_logprobs=batch["proximal_logprobs"] - 0.5)
    settings = {"reward_weight": weight, "reward_advantage": "grpo/group_centered"}
    found = build("advantages", "self_distillation", **settings)(batch)
    centered = [0.5, -0.5, 0.0, 0.0, 0.0]
    wanted = [
        (1 - weight) * -0.5 + weight * centered[row] if bool(batch["loss_mask"][place]) else 0.0
        for place, row in enumerate(batch.tokens.row_index.tolist())
    ]
    assert found.tolist() == pytest.approx(wanted, abs=1e-6)
    assert found.dtype == torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("decay", [None, 0.75])
def test_the_numbers_are_those_of_transformers_before_and_after_an_update(decay, tmp_path):
    """The true engine, in micro-batches, against one pass of transformers for each text; then with the averages."""
    transformers = pytest.importorskip("transformers")
    folder = make_model(tmp_path / "model")
    chosen = select(
        "algorithms",
        {
            "type": "finetuning/sdpo",
            "batch_transforms": [{"type": "finetuning/self_teacher", "ema_decay": decay}],
            "corrections": [],
        },
    )
    settings = {"type": "fsdp/fsdp", "learning_rate": 1e-2, "max_tokens_per_microbatch": 8}
    engines = {}
    for name, role in roles_of(chosen, 1).items():
        engines[name] = select("train_engines", settings).build()
        engines[name].setup(ModelReference(str(folder), "float32"), role, OptimizerSettings(4, 1.0))
    assert list(engines) == (["actor"] if decay is None else ["actor", "self_teacher"])
    algorithm = chosen.build()
    batch = make_batch(reward=torch.zeros(len(ROWS)))
    batch.tokens.values.pop("proximal_logprobs")
    policy = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    average = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    try:
        for step in range(2):
            context = BatchContext(TrainingSection(), engines, step=step)
            prepared = algorithm.prepare(batch, context)
            wanted = torch.zeros(batch.token_count)
            for (prompt, answer, shown), start in zip(ROWS, batch.tokens.offsets.tolist(), strict=False):
                own = logprobs_of(policy, prompt, answer)
                taught = logprobs_of(policy if decay is None else average, shown, answer) if shown else own
                wanted[start + len(prompt) - 1 : start + len(prompt) - 1 + len(answer)] = taught - own
            torch.testing.assert_close(prepared["advantages"], wanted, rtol=1e-4, atol=1e-4)
            assert float(wanted.abs().max()) > 0.05
            for works in algorithm.updates(prepared, context):
                numbers = engines["actor"].train(works)
                mean = float(wanted.sum() / batch["loss_mask"].sum())
                assert float(numbers["teacher_kl"].as_numbers("kl")["kl"]) == pytest.approx(-mean, abs=1e-4)
            load(policy, engines["actor"])
            if decay is not None:
                engines["self_teacher"].update_ema(engines["actor"], decay)
                with torch.no_grad():
                    for mean_of, newest in zip(average.parameters(), policy.parameters(), strict=True):
                        mean_of.mul_(decay).add_(newest, alpha=1 - decay)
    finally:
        for engine in engines.values():
            engine.close()


def logprobs_of(model, prompt, answer):
    """Return the log-probability of each token of an answer after a prompt, [len(answer)]."""
    if not answer:
        return torch.zeros(0)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0]
    chosen = torch.log_softmax(logits[len(prompt) - 1 : -1].float(), -1)
    return chosen.gather(1, torch.tensor(answer)[:, None])[:, 0]


def load(model, engine):
    """Copy the weights of an engine into a model of transformers."""
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in engine.named_full_parameters():
            weights[name].copy_(value)
