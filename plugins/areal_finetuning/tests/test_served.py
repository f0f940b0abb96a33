"""The engine of served models, against a server that scores with transformers and answers as SGLang and vLLM do."""

import sys
from pathlib import Path

import pytest
import torch

from areal_core.config import select
from areal_core.data import PackedBatch, Ragged, shift_to_predictions
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import ConfigError, RunError
from areal_core.sdk import ACTOR, CRITIC, REFERENCE
from areal_finetuning import served
from areal_finetuning.config import TEACHER
from areal_testing.conformance import make_model

sys.path.insert(0, str(Path(__file__).parent))
from scoring_server import scores_of, serving

SETTINGS = OptimizerSettings(10, 1.0)
MODEL = ModelReference("nowhere")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


def make_batch(lengths=(4, 1, 7, 2), **sequences):
    generator = torch.Generator().manual_seed(0)
    tokens = {"input_ids": torch.randint(61, (sum(lengths),), generator=generator)}
    tokens["loss_mask"] = torch.ones(sum(lengths), dtype=torch.bool)
    columns = {key: torch.tensor(value) for key, value in sequences.items()}
    return shift_to_predictions(PackedBatch(Ragged(torch.tensor(lengths), tokens), columns))


def make_engine(*addresses, **keys):
    engine = select("train_engines", {"type": "finetuning/served", "addresses": list(addresses), **keys}).build()
    engine.setup(MODEL, TEACHER, SETTINGS)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["sglang", "openai"])
def test_log_probabilities_are_those_of_an_engine_that_has_the_model(model, protocol):
    own = select("train_engines", {"type": "fsdp/fsdp"}).build()
    own.setup(ModelReference(str(model), "float32"), REFERENCE, SETTINGS)
    batch = make_batch()
    wanted = own.forward(batch, ["logprobs"])["logprobs"]
    own.close()
    with serving(scores_of(model)) as (address, requests):
        found = make_engine(address, protocol=protocol).forward(batch, ["logprobs"])["logprobs"]
    inside = batch["loss_mask"]
    torch.testing.assert_close(found[inside], wanted[inside], atol=1e-5, rtol=1e-4)
    assert found.dtype == torch.float32
    assert not found[~inside].any()
    assert {body.get("model", "tiny") for _, body, _ in requests} == {"tiny"}, "the only one that is listed"
    assert len(requests) == 1 + 3, "one at the start, and a sequence of one token needs none"
    assert {path for path, _, _ in requests} == {"/generate" if protocol == "sglang" else "/v1/completions"}


def test_a_column_chooses_the_model_of_a_sequence():
    batch = make_batch(**{"reward.place": [1.0, 0.0, 0.0, 1.0]})
    with (
        serving(lambda ids: [-1.0] * (len(ids) - 1)) as (one, _),
        serving(lambda ids: [-2.0] * (len(ids) - 1)) as (two, _),
    ):
        engine = make_engine(one, two, chosen_by="reward.place")
        found = [
            part.tolist() for part in engine.forward(batch, ["logprobs"])["logprobs"].split(batch.lengths.tolist())
        ]
        assert found == [[-2.0] * 3 + [0.0], [0.0], [-1.0] * 6 + [0.0], [-2.0, 0.0]]
        for wrong in (2.0, -1.0, 0.5, float("nan")):
            with pytest.raises(RunError, match="has the addresses 0 to 1"):
                engine.forward(make_batch(**{"reward.place": [wrong, 0.0, 0.0, 0.0]}), ["logprobs"])
        with pytest.raises(RunError, match="the batch has no such column"):
            engine.forward(make_batch(), ["logprobs"])


def test_a_server_that_fails_is_asked_again_and_then_named(monkeypatch):
    monkeypatch.setattr(served.asyncio, "sleep", no_sleep)
    answers = [503, 503]

    def score(ids):
        return answers.pop() if answers else [-1.0] * (len(ids) - 1)

    with serving(score) as (address, requests):
        engine = make_engine(address, attempts=3)
        assert len(requests) == 3
        answers += [503] * 100
        with pytest.raises(RunError, match=rf"the server {address} of the role 'teacher' was lost 3 times"):
            engine.forward(make_batch(), ["logprobs"])
    with pytest.raises(RunError, match="was lost 2 times"):
        make_engine("http://127.0.0.1:1", attempts=2)


async def no_sleep(_):
    pass


@pytest.mark.parametrize(
    ("score", "problem"),
    [
        (lambda ids: 400, "refused 2 tokens"),
        (lambda ids: [0.5] * (len(ids) - 1), "did not score the given tokens: .*positive or not a number"),
        (lambda ids: [None] * (len(ids) - 1), "did not score the given tokens: TypeError"),
    ],
)
def test_wrong_answers_are_errors_at_the_start(score, problem):
    with serving(score) as (address, _), pytest.raises(RunError, match=problem):
        make_engine(address)


def test_other_tokens_are_refused():
    for protocol, answer in (
        ("sglang", {"meta_info": {"input_token_logprobs": [[None, 1], [-1.0, 3]]}}),
        ("openai", {"choices": [{"logprobs": {"token_logprobs": [None]}}]}),
    ):
        with pytest.raises(ValueError, match="it scored"):
            served._logprobs(protocol, answer, [1, 2])


def test_the_key_is_sent(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "secret")
    with serving(lambda ids: [-1.0] * (len(ids) - 1)) as (address, requests):
        make_engine(address, api_key_variable="TEACHER_KEY")
    assert requests[0][2] == "Bearer secret"


@pytest.mark.parametrize(("role", "problem"), [(ACTOR, "changes"), (CRITIC, "changes")])
def test_a_role_that_learns_is_refused(role, problem):
    engine = select("train_engines", {"type": "finetuning/served", "addresses": ["http://127.0.0.1:1"]}).build()
    with pytest.raises(RunError, match=problem):
        engine.setup(MODEL, role, SETTINGS)
    with pytest.raises(RunError, match="at temperature 1"):
        engine.setup(MODEL, TEACHER, OptimizerSettings(10, 0.7))
    for output in ("entropy", "divergence:actor:0.5"):
        with pytest.raises(RunError, match="compute logprobs, not"):
            engine.forward(make_batch(), ["logprobs", output])


GENERATES = ("workflow=single_turn", "inference_engine=parts.py:Engine")
SERVED = "roles.teacher={type: finetuning/served, addresses: ['http://a:1', 'http://b:1'], chosen_by: reward.place}"
PLACE = "rewards=[{type: finetuning/place, key: teacher, values: [math, code], weight: 0}]"


def test_a_served_teacher_needs_no_path(read):
    config = read("algorithm=distill", *GENERATES, SERVED, PLACE)
    assert config.roles["teacher"].settings.chosen_by == "reward.place"
    with pytest.raises(ConfigError, match="no reward is called place"):
        read("algorithm=distill", *GENERATES, SERVED)
    with pytest.raises(ConfigError, match=r"sampling\.temperature is 0\.7"):
        read("algorithm=distill", *GENERATES, SERVED, PLACE, "sampling.temperature=0.7")
    with pytest.raises(ConfigError, match="nothing says which one scores a sequence"):
        read("algorithm=distill", *GENERATES, "roles.teacher={type: finetuning/served, addresses: [a, b]}")


def test_a_server_of_several_models_needs_the_name_of_one(model):
    with serving(lambda ids: [-1.0] * (len(ids) - 1), ["small", "large"]) as (address, requests):
        with pytest.raises(RunError, match="lists the models small, large: set served_model to one of them"):
            make_engine(address, protocol="openai")
        make_engine(address, protocol="openai", served_model="large")
    assert [body["model"] for _, body, _ in requests] == ["large"]
