"""What the suites do not ask: records made by hand, a workflow without a run, hooks one by one."""

import asyncio
import inspect

import pytest
import torch
from areal_core.config import Secret
from areal_core.data import (
    FinishReason,
    Generation,
    PackedBatch,
    TrajectoryBuilder,
    group_mean,
    shift_to_predictions,
    split_into_microbatches,
)
from areal_core.interfaces import PolicyTerms, RewardScore, WorkflowContext
from areal_core.library import train
from areal_core.plugins import PluginManager
from areal_core.testing.fakes import CountingDataset, FakeTokenizer

from areal_outside.advantages import better_or_worse
from areal_outside.config import LinesSettings, SelfCheckSettings
from areal_outside.plugin import areal_run_finished
from areal_outside.policy_losses import capped_reinforce
from areal_outside.workflows import SelfCheck


def generation(text):
    ids = [ord(character) for character in text]
    return Generation(ids, [-1.0] * len(ids), [3] * len(ids), FinishReason.STOP)


def play(row):
    """An episode of the workflow whose model says 8 to everything."""

    async def generate(ids, **options):
        return generation("8")

    async def score(*, prompt, completion, completion_ids, finish_reason):
        return RewardScore(float(completion == row["answer"]), {"right": 1.0})

    context = WorkflowContext(FakeTokenizer(), generate, score, is_evaluation=False, sample_index=0)
    return asyncio.run(SelfCheck(SelfCheckSettings()).run_episode(row, context))


def test_an_episode():
    episode = play({"prompt": "4+4=", "answer": "8"})
    assert (episode.reward, episode.rewards) == (1.0, {"right": 1.0})
    (trajectory,) = episode.trajectories
    assert trajectory.tokens["loss_mask"].sum() == 2
    assert set(trajectory.tokens["versions"].tolist()) == {-1, 3}
    assert "Is that right?" in episode.text


def test_a_batch():
    built = []
    for text in ("8", "9", "10", "8"):
        builder = TrajectoryBuilder()
        builder.add_context([ord(character) for character in "4+4="])
        builder.add_generation(generation(text))
        built.append(builder.build())
    batch = PackedBatch.from_trajectories(built).with_sequences(
        reward=torch.tensor([1.0, 0.0, 0.0, 1.0]),
        group_id=torch.tensor([7, 7, 7, 7]),
        episode_id=torch.arange(4),
        part_index=torch.zeros(4, dtype=torch.int64),
        agent_id=torch.zeros(4, dtype=torch.int64),
    )
    assert (len(batch), batch.token_count, batch.lengths.tolist()) == (4, 21, [5, 5, 6, 5])
    torch.testing.assert_close(group_mean(batch, batch["reward"]), torch.full((4,), 0.5))
    assert better_or_worse(batch, margin=0.1).tolist() == [1, -1, -1, 1]
    shifted = shift_to_predictions(batch)
    assert int(shifted["loss_mask"].sum()) == 5
    assert sum(len(part) for part in split_into_microbatches(shifted.lengths.tolist(), max_tokens=12)) == 4


def test_a_policy_loss():
    logprobs = torch.tensor([-1.0, -2.0])
    terms = PolicyTerms(
        logprobs=logprobs,
        proximal_logprobs=logprobs - 1,
        behavior_logprobs=logprobs,
        advantages=torch.ones(2),
        mask=torch.tensor([True, True]),
        row_index=torch.tensor([0, 0]),
        rows=1,
    )
    losses, metrics = capped_reinforce(terms, cap=2.0)
    assert losses.tolist() == [2.0, 4.0]
    assert metrics["capped_fraction"].tolist() == [1, 1]


def test_a_secret_is_not_shown(monkeypatch):
    monkeypatch.setenv("OUTSIDE_TOKEN", "of nobody else")
    settings = LinesSettings(token=Secret("env:OUTSIDE_TOKEN"))
    assert settings.token.get() == "of nobody else"
    assert "of nobody" not in settings.model_dump_json()
    with pytest.raises(ValueError, match="patience_s"):
        LinesSettings(patience_s=0)


def test_what_is_supplied():
    found = {record.reference: type(record).__name__ for _, record in PluginManager.load(["outside"]).records()}
    assert found["outside/small"] == "Preset"
    assert found["outside/count"] == "Command"
    assert found["outside/python"] == "HealthCheck"
    assert found["outside/better"] == "Component"


def test_the_outcome_is_left_in_the_run_folder(tmp_path):
    areal_run_finished(tmp_path, "done")
    assert (tmp_path / "outside.txt").read_text() == "done\n"


def test_a_script_can_train():
    """`scripts/train.py` of this project calls it so; a run takes longer than a test should."""
    inspect.signature(train).bind({"dataset": CountingDataset}, plugins=["outside"], run_dir="run")
