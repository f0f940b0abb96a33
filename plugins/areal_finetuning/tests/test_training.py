"""Updates of the true engine on a tiny model: preferences and scores are learned; a reward model loads elsewhere."""

import pytest
import torch

from areal_core.config import roles_of, select
from areal_core.config.sections import TrainingSection
from areal_core.data import PackedBatch, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.training.context import BatchContext
from areal_finetuning.example_tokenizers import trajectory
from areal_testing.conformance import make_model, numbers_of

pytestmark = pytest.mark.slow
UPDATES, PAIRS, VOCABULARY = 30, 16, 61


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


def preferences(step):
    """Answers of even tokens are preferred to answers of odd ones, whatever was asked."""
    generator = torch.Generator().manual_seed(step)
    found, units = [], []

    def some(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    for pair in range(PAIRS):
        prompt = torch.randint(3, VOCABULARY, (some(2, 9),), generator=generator).tolist()
        for is_chosen in (True, False):
            answer = (
                2 * torch.randint(2, VOCABULARY // 2, (some(1, 7),), generator=generator) + (not is_chosen)
            ).tolist()
            side = trajectory([(prompt, False), (answer, True)], None, "refuse")
            side.sequence["is_chosen"] = torch.tensor(is_chosen)
            found.append(side)
            units.append(pair)
    batch = PackedBatch.from_trajectories(found).with_sequences(group_id=torch.tensor(units))
    return shift_to_predictions(batch.with_units(torch.tensor(units)))


@pytest.fixture
def learn(model):
    """A function that trains an algorithm of a config; its engines, and the metrics of each update."""
    made = []

    def learn(name, learning_rate=1e-3, **keys):
        chosen = select("algorithms", {"type": f"finetuning/{name}", **keys})
        settings = {"type": "fsdp/fsdp", "learning_rate": learning_rate, "max_tokens_per_microbatch": 128}
        engine = select("train_engines", settings)
        engines = {}
        for role, needed in roles_of(chosen, 1).items():
            engines[role] = engine.build()
            engines[role].setup(ModelReference(str(model), "float32"), needed, OptimizerSettings(UPDATES, 1.0))
            made.append(engines[role])
        algorithm, metrics = chosen.build(), []
        for step in range(UPDATES):
            offered = BatchContext(TrainingSection(), engines, step=step)
            (works,) = algorithm.updates(algorithm.prepare(preferences(step), offered), offered)
            metrics.append(numbers_of(engines[works[0].role].train(works)))
        return engines, metrics

    yield learn
    for engine in made:
        engine.close()


def mean(metrics, name):
    return sum(each[name] for each in metrics) / len(metrics)


@pytest.mark.parametrize(("name", "keys"), [("dpo", {}), ("dpo", {"label_smoothing": 0.1, "beta": 0.3}), ("ipo", {})])
def test_preferences_are_learned(name, keys, learn):
    engines, metrics = learn(name, **keys)
    assert list(engines) == ["actor", "reference"]
    first, last = metrics[0], metrics[-5:]
    assert first["margin"] == pytest.approx(0, abs=1e-3), "the policy begins as the reference"
    assert mean(last, "accuracy") > 0.9
    assert mean(last, "margin") > 0.3
    assert mean(last, "loss") < first["loss"]
    assert (
        mean(last, "chosen_logprob") - mean(last, "rejected_logprob")
        > first["chosen_logprob"] - first["rejected_logprob"]
    )
    batch = preferences(999)
    before = engines["reference"].forward(batch, ["logprobs"])["logprobs"]
    after = engines["actor"].forward(batch, ["logprobs"])["logprobs"]
    assert not torch.equal(before, after), "the reference stays, the policy moves"


def test_a_reward_model_is_learned_and_is_a_sequence_classifier(learn, tmp_path):
    transformers = pytest.importorskip("transformers")
    engines, metrics = learn("reward_model", centering=0.01)
    assert list(engines) == ["reward"]
    assert mean(metrics[-5:], "accuracy") > 0.9
    assert mean(metrics[-5:], "margin") > 0.5 + metrics[0]["margin"]
    assert mean(metrics[-5:], "loss") < 0.5
    batch = preferences(999)
    values = engines["reward"].forward(batch, ["values"])["values"]
    scores = values[batch.tokens.offsets[1:] - 1]
    engines["reward"].export(tmp_path / "reward")
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward").eval()
    assert loaded.config.architectures == ["Qwen3ForSequenceClassification"]
    assert loaded.config.num_labels == 1
    with torch.no_grad():
        wanted = [loaded(input_ids=ids[None]).logits for ids in batch["input_ids"].split(batch.lengths.tolist())]
    torch.testing.assert_close(scores, torch.cat(wanted)[:, 0], rtol=1e-4, atol=1e-4)
    right = scores[batch["is_chosen"]] > scores[~batch["is_chosen"]]
    assert right.float().mean() > 0.9, "on pairs that were not trained on"
