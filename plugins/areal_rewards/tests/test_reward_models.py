"""Scores of a tiny reward model: in this process, behind an address, and as transformers computes them."""

import asyncio
import json
import re
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from areal_core.config import resolve
from areal_core.config.context import ResolutionContext
from areal_core.errors import ConfigError
from areal_rewards import model_server
from areal_rewards.config import RemoteRewardModelSettings, RewardModelSettings
from areal_rewards.model_server import ModelServer
from areal_rewards.reward_models import RemoteRewardModel, RewardModel, ScoringModel

pytestmark = pytest.mark.slow

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with random weights and a tokenizer of letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    path = tmp_path_factory.mktemp("reward_model")
    words = {letter: number for number, letter in enumerate(LETTERS)} | {"<end>": len(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>").save_pretrained(path)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=len(words), num_labels=1, pad_token_id=len(LETTERS), **sizes, **heads)
    Qwen3ForSequenceClassification(config).save_pretrained(path)
    return path


def by_transformers(folder, ids):
    """The score of one sequence, by the model's own forward without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, pad_token_id=None).eval()
    with torch.no_grad():
        hidden = model.base_model(input_ids=torch.tensor([ids]))[0]
        return float(model.score(hidden)[0, -1, 0])


def test_scores_are_those_at_the_last_token_whatever_is_scored_beside(folder):
    """The end of the sequence is the padding's token here, which transformers by itself would step over."""
    model = ScoringModel(str(folder))
    end = len(LETTERS)
    sequences = [[1, 2, 3, end], [4, 5], [6, 7, 8, 9, 10, 11, end], [end]]
    found = model.score(sequences)
    assert found == pytest.approx([by_transformers(folder, ids) for ids in sequences], abs=1e-5)
    assert len(set(found)) == 4


def test_sequences_without_room_beside_each_other_are_scored_in_halves(folder, monkeypatch):
    model = ScoringModel(str(folder))
    sequences = [[1, 2, 3], [4, 5], [6], [7, 8], [9]]
    wanted, passes, forward = model.score(sequences), [], model._model.base_model.forward

    def forward_of_a_small_gpu(input_ids, **others):
        passes.append(len(input_ids))
        if len(input_ids) > room:
            raise torch.OutOfMemoryError("no room")
        return forward(input_ids=input_ids, **others)

    monkeypatch.setattr(model._model.base_model, "forward", forward_of_a_small_gpu)
    room = 2
    assert model.score(sequences) == pytest.approx(wanted, abs=1e-5)
    assert passes == [5, 2, 3, 1, 2]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        model.score(sequences)


def test_a_batch_of_the_server_has_no_more_tokens_than_it_may(folder):
    async def batches():
        server = ModelServer(ScoringModel(str(folder)), longest=100, batch_tokens=12)
        for length in (3, 4, 2, 5, 60, 1, 1):
            await server._waiting.put(([1] * length, asyncio.get_running_loop().create_future()))
        return [[len(ids) for ids, _ in await server._batch()] for _ in range(4)]

    assert asyncio.run(batches()) == [[3, 4, 2], [5], [60], [1, 1]]


def test_it_computes_on_the_cpu_or_on_a_gpu_that_placement_leaves(tmp_path):
    def resolved(**device):
        reward = json.dumps({"type": "rewards/reward_model", "path": str(tmp_path), **device})
        words = ["placement.generation=[0]", "placement.training=[2]", "rollout.reward_processes=4"]
        return resolve(None, ["grpo", "rewards"], [f"rewards=[{reward}]", *words]).config

    assert resolved().rewards[0].settings.device == "cpu"
    with pytest.raises(ConfigError, match=r"rewards\.0: device is cuda:2, which placement gives to servers or"):
        resolved(device="cuda:2")
    notes = list(resolved(device="cuda:3").cross_notes())
    assert any(note.startswith("rewards.0: 4 reward process(es) load the model on cuda:3") for note in notes), notes


def test_the_reward_is_the_score_of_prompt_and_sampled_tokens(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked, said = tokenizer.encode("what", add_special_tokens=False), [3, 4, len(LETTERS)]
    reward = RewardModel(RewardModelSettings(path=str(folder)))
    found = reward(prompt="what", completion="de", completion_ids=said)
    assert found == pytest.approx(by_transformers(folder, [*asked, *said]), abs=1e-5)
    text = RewardModel(RewardModelSettings(path=str(folder), same_tokens=False))
    for reason, ids in (("stop", said), ("length", [3, 4])):
        found = text(prompt="what", completion="de", completion_ids=[999], finish_reason=reason)
        assert found == pytest.approx(by_transformers(folder, [*asked, *ids]), abs=1e-5)


def test_its_folder_is_beside_the_config_or_a_name_on_the_hub(tmp_path):
    config = resolve(None, ["grpo"]).config
    (tmp_path / "scores").mkdir()
    context = ResolutionContext(folder=tmp_path)
    for path, read in (("scores", str(tmp_path / "scores")), ("owner/name", "owner/name")):
        settings = RewardModelSettings.model_validate({"path": path}, context=context)
        assert settings.path == read
        assert list(settings.check(config)) == []
    (problem,) = RewardModelSettings.model_validate({"path": "../gone"}, context=context).check(
        resolve(None, ["grpo"]).config
    )
    assert "there is no folder ../gone" in problem


def test_a_model_that_is_no_reward_model_is_refused(tmp_path, folder):
    config = Qwen3Config.from_pretrained(folder, num_labels=3)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    with pytest.raises((ValueError, ConfigError), match="no single head of one output"):
        ScoringModel(str(tmp_path))


def test_behind_an_address_it_scores_the_same(folder):
    command = [sys.executable, "-m", "areal_core", "serve_model", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            address = re.fullmatch(r"ready: (http://127\.0\.0\.1:\d+)\n", line)[1]
            local = RewardModel(RewardModelSettings(path=str(folder)))
            asked = [
                {"prompt": "what", "completion": "x", "completion_ids": [1 + n % 9] * (1 + n % 4)} for n in range(20)
            ]

            async def ask():
                remote = RemoteRewardModel(RemoteRewardModelSettings(address=address, max_retries=0))
                try:
                    found = await asyncio.gather(*(remote(**each) for each in asked))
                    with pytest.raises(RuntimeError, match=r"400 Bad Request.*has 0 tokens; it must have 1 to"):
                        await remote(prompt="", completion="", completion_ids=[])
                    with pytest.raises(RuntimeError, match=r"400 Bad Request.*token ids must be from 0 to 27"):
                        await remote(prompt="a", completion="", completion_ids=[28])
                    with pytest.raises(RuntimeError, match=r"400 Bad Request.*prompt and completion, both text"):
                        await remote(prompt=["what"], completion="x", completion_ids=[1])
                    with pytest.raises(RuntimeError, match="413 Request Entity Too Large"):
                        await remote(prompt="a " * 2**21, completion="x", completion_ids=[1])
                    return found
                finally:
                    await remote._client.close()

            found = asyncio.run(asyncio.wait_for(ask(), 120))
            assert found == pytest.approx([local(**each) for each in asked], abs=1e-5)
        finally:
            process.kill()


def test_an_address_that_nobody_serves_is_told():
    async def ask():
        remote = RemoteRewardModel(RemoteRewardModelSettings(address="http://127.0.0.1:9", max_retries=0))
        try:
            await remote(prompt="a", completion="b", completion_ids=[1])
        finally:
            await remote._client.close()

    with pytest.raises(RuntimeError, match=r"the reward model at http://127\.0\.0\.1:9/score did not answer"):
        asyncio.run(asyncio.wait_for(ask(), 60))


def test_a_folder_without_a_model_is_not_served(tmp_path, capsys):
    assert model_server.main([str(tmp_path)]) == 2
    assert f"'{tmp_path}' is not a model: it has no config.json" in capsys.readouterr().err
