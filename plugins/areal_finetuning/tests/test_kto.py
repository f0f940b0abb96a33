"""KTO against a loop over sequences in Python's floats, against TRL's values, and on a tiny model."""

import math

import pytest
import torch

from areal_core.config import resolve, roles_of, select
from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import ConfigError
from areal_core.sdk import RowError
from areal_core.training.context import BatchContext
from areal_finetuning.example_tokenizers import trajectory
from areal_finetuning.kto import kto_losses, mismatch
from areal_testing.conformance import make_model, numbers_of
from areal_testing.fakes import FakeContext

SETTINGS = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.7}


TRL = {
    0.4: [0.497500021, 0.541156668, 0.435363708, 0.718086796, 0.626804585],
    -0.2: [0.487502604, 0.531209373, 0.425557483, 0.731279216, 0.640074183],
}
"""By KL: the losses of `KTOTrainer._compute_loss` of TRL 1.16.0, called with one sequence at a time (2026-11-30)."""


@pytest.fixture
def labeled():
    """Five shifted sequences in float64: prompts of other lengths, answers with a hole in the mask."""
    generator = torch.Generator().manual_seed(4)
    prompts, answers = [3, 1, 4, 2, 5], [4, 6, 1, 3, 2]
    mask = torch.cat([torch.arange(p + a) >= p for p, a in zip(prompts, answers, strict=True)])
    mask[3 + 2] = False
    total = int(sum(prompts) + sum(answers))
    tokens = {"input_ids": torch.arange(100, 100 + total), "loss_mask": mask}
    lengths = torch.tensor([p + a for p, a in zip(prompts, answers, strict=True)])
    labels = {
        "is_desirable": torch.tensor([True, False, False, True, False]),
        "group_id": torch.tensor([5, 1, 9, 2, 7]),
    }
    batch = shift_to_predictions(PackedBatch(Ragged(lengths, tokens), labels))
    noise = torch.rand(total, generator=generator, dtype=torch.float64)
    return batch.with_tokens(reference_logprobs=-2 * noise)


def logprobs_of(role, batch, outputs):
    """Log-probabilities that depend on role, token and target, so that mismatched sequences have others."""
    factor = 0.11 if role == "actor" else 0.07
    return {"logprobs": -0.1 - torch.sin(factor * (3 * batch["targets"] + batch["input_ids"]).double()).square()}


def row_sum(batch, values, row):
    places = range(*batch.tokens.offsets[row : row + 2].tolist())
    return sum(float(values[t]) for t in places if bool(batch["loss_mask"][t]))


def by_hand(batch, logprobs):
    """The loss in floats; the mismatched sequences are put together from lists of tokens."""
    order = sorted(range(len(batch)), key=lambda row: int(batch["group_id"][row]))
    lengths = batch.lengths.tolist()
    ids = [part.tolist() for part in batch["input_ids"].split(lengths)]
    masks = [[False, *part.tolist()[:-1]] for part in batch["loss_mask"].split(lengths)]
    ratios = []
    for place, row in enumerate(order):
        before = order[place - 1]
        start, first = masks[row].index(True), masks[before].index(True)
        mixed = (ids[row][:start] + ids[before][first:])[: max(lengths)]
        mask = ([False] * start + masks[before][first:])[: max(lengths)]
        total = 0.0
        for t in range(1, len(mixed)):
            if mask[t]:
                one = {"input_ids": torch.tensor([mixed[t - 1]]), "targets": torch.tensor([mixed[t]])}
                policy, reference = (logprobs_of(role, one, ())["logprobs"] for role in ("actor", "reference"))
                total += float(policy - reference)
        ratios.append(total)
    kl = max(0.0, sum(ratios) / len(ratios))
    losses = []
    for row in range(len(batch)):
        ratio = row_sum(batch, logprobs, row) - row_sum(batch, batch["reference_logprobs"], row)
        good = bool(batch["is_desirable"][row])
        weight = SETTINGS["desirable_weight"] if good else SETTINGS["undesirable_weight"]
        argument = SETTINGS["beta"] * (ratio - kl) * (1 if good else -1)
        losses.append(weight * (1 - 1 / (1 + math.exp(-argument))))
    return sum(losses) / len(losses), kl


def work_of(build, labeled):
    context = FakeContext(logprobs_of)
    algorithm = build("algorithms", "kto", **SETTINGS)
    reference = labeled["reference_logprobs"]
    prepared = algorithm.prepare(labeled, context).with_tokens(reference_logprobs=reference)
    ((work,),) = algorithm.updates(prepared, context)
    return work, context


def test_loss_and_gradient_are_those_of_the_loop(labeled, build):
    work, context = work_of(build, labeled)
    logprobs = logprobs_of("actor", work.batch, ())["logprobs"].requires_grad_()
    result = work.loss(work.batch, {"logprobs": logprobs})
    result.loss.backward()
    values = logprobs.detach()
    wanted, kl = by_hand(labeled, values)
    assert result.loss.item() == pytest.approx(wanted, abs=1e-12)
    assert numbers_of(context.metrics)["kl"] == pytest.approx(kl, abs=1e-12)
    for place in range(len(values)):
        step = torch.zeros_like(values)
        step[place] = 1e-5
        slope = (by_hand(labeled, values + step)[0] - by_hand(labeled, values - step)[0]) / 2e-5
        assert logprobs.grad[place].item() == pytest.approx(slope, abs=1e-8)


def test_losses_are_those_of_trl():
    """A negative estimate of the KL counts as 0."""
    ratios = torch.tensor([0.5, -1.25, 3.0, 2.0, -0.75], dtype=torch.float64)
    good = torch.tensor([True, True, True, False, False])
    weights = {"desirable_weight": 1.0, "undesirable_weight": 1.33}
    for kl, values in TRL.items():
        losses = kto_losses(ratios, torch.tensor(max(kl, 0.0)), good, beta=0.1, **weights)
        assert losses.tolist() == pytest.approx(values, abs=1e-7)


def test_mismatched_sequences_are_cut_and_keep_the_mask(labeled):
    found = mismatch(labeled)
    assert int(found.lengths.max()) <= int(labeled.lengths.max())
    one = labeled.select([0])
    with pytest.raises(ValueError, match="this update has one row: set"):
        mismatch(one)


def test_rows_have_prompt_completion_and_label(tokenizer, build):
    encode = build("example_tokenizers", "labeled")
    (sequence,) = encode({"prompt": "2+2=", "completion": "4", "label": True}, tokenizer)
    assert bool(sequence.sequence["is_desirable"])
    messages = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    (sequence,) = encode({**messages, "label": 0}, tokenizer)
    assert not bool(sequence.sequence["is_desirable"])
    for row, problem in (
        ({"prompt": "a", "completion": "b"}, "lacks label"),
        ({"prompt": "a", "completion": "b", "label": 0.5}, "'label' is 0.5"),
        ({"prompt": "a", "completion": "b", "label": "true"}, "'label' is 'true'"),
        ({"label": True, "chosen": "a"}, "lacks prompt, completion"),
    ):
        with pytest.raises(RowError, match=problem):
            encode(row, tokenizer)


def test_an_update_of_one_row_is_refused_before_the_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ["training.num_minibatches=4", "rollout.batch_size=7"]
    with pytest.raises(ConfigError, match=r"rollout\.batch_size must be at least 8"):
        resolve("finetuning/kto", overrides=overrides, environment={})


def test_another_example_tokenizer_is_refused(build, pairs, labeled):
    algorithm = build("algorithms", "kto")
    with pytest.raises(ValueError, match="needs an example tokenizer that labels each sequence"):
        algorithm.prepare(PackedBatch(labeled.tokens, {"group_id": labeled["group_id"]}), FakeContext(logprobs_of))
    with pytest.raises(ValueError, match="choose an example tokenizer of one sequence"):
        algorithm.prepare(pairs, FakeContext(logprobs_of))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_labels_are_learned(seed, tmp_path):
    """Answers of even tokens are desirable, those of odd tokens are not; unseen answers differ after 40 updates."""
    model = make_model(tmp_path / "model")
    chosen = select("algorithms", {"type": "finetuning/kto"})
    settings = {"type": "fsdp/fsdp", "learning_rate": 1e-3, "max_tokens_per_microbatch": 128}
    engines = {}
    for role, needed in roles_of(chosen, 1).items():
        engines[role] = select("train_engines", settings).build()
        engines[role].setup(ModelReference(str(model), "float32"), needed, OptimizerSettings(40, 1.0))
    algorithm, metrics = chosen.build(), []
    for step in range(40):
        context = BatchContext(TrainingSection(), engines, step=step)
        (works,) = algorithm.updates(algorithm.prepare(answers(step, seed), context), context)
        metrics.append({**numbers_of(engines["actor"].train(works)), **numbers_of(context.metrics)})
    first, last = metrics[0], metrics[-1]
    assert first["desirable_reward"] == pytest.approx(0, abs=1e-3), "the policy begins as the reference"
    assert first["kl"] == pytest.approx(0, abs=1e-3)
    assert last["desirable_reward"] - last["undesirable_reward"] > 0.3
    assert last["loss"] < first["loss"] - 0.05
    unseen = answers(999, seed)
    context = BatchContext(TrainingSection(), engines)
    after, before = (context.forward(role, unseen, ["logprobs"])["logprobs"] for role in ("actor", "reference"))
    ratios = torch.zeros(len(unseen)).index_add(0, unseen.tokens.row_index, (after - before) * unseen["loss_mask"])
    assert ratios[unseen["is_desirable"]].mean() > ratios[~unseen["is_desirable"]].mean() + 1
    for engine in engines.values():
        engine.close()


def answers(step, seed):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    found = []
    for row in range(32):
        prompt = torch.randint(3, 61, (int(torch.randint(2, 9, (), generator=generator)),), generator=generator)
        count = int(torch.randint(1, 7, (), generator=generator))
        answer = 2 * torch.randint(2, 30, (count,), generator=generator) + row % 2
        side = trajectory([(prompt.tolist(), False), (answer.tolist(), True)], None, "refuse")
        side.sequence["is_desirable"] = torch.tensor(row % 2 == 0)
        found.append(side)
    batch = PackedBatch.from_trajectories(found).with_sequences(group_id=torch.arange(32))
    return shift_to_predictions(batch)
