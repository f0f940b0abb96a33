import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from areal_core.config import resolve
from areal_core.data import PackedBatch, Ragged
from areal_core.interfaces.algorithm import PolicyTerms
from areal_core.plugins import PluginManager

sys.path.insert(0, str(Path(__file__).parent))  # for modules of tests that are no tests
import scalar_loops
from composed import make_rollouts

PARTS = """
class Rows:
    def __init__(self): ...
class Engine:
    def __init__(self): ...
def score(completion): ...
"""
RUN = """
plugins: [grpo]
steps: 1
model: {path: tiny}
dataset: parts.py:Rows
workflow: single_turn
inference_engine: parts.py:Engine
train_engine: parts.py:Engine
algorithm: {type: grpo/grpo}
"""


def pytest_configure():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def manager():
    return PluginManager.load(["grpo"])


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that resolves a config with these overrides."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    return lambda *overrides: resolve("run.yaml", overrides=overrides, environment={}).config


def _make_batch(rewards, groups, episodes=None, lengths=None, seed=0):
    """A batch as the trainer sees it: shifted, so that the last position of a sequence is not learned from."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(lengths or [3 + row % 4 for row in range(len(rewards))])
    total = int(lengths.sum())
    mask = torch.rand(total, generator=generator) < 0.7
    mask[lengths.cumsum(0) - 1] = False
    tokens = {
        "input_ids": torch.randint(50, (total,), generator=generator),
        "loss_mask": mask,
        "logprobs": -2 * torch.rand(total, generator=generator),
    }
    return PackedBatch(
        Ragged(lengths, tokens),
        {
            "reward": torch.tensor(rewards, dtype=torch.float32),
            "group_id": torch.tensor(groups),
            "episode_id": torch.tensor(episodes if episodes is not None else list(range(len(rewards)))),
        },
    )


@pytest.fixture(scope="session")
def make_batch():
    return _make_batch


def _make_terms(logprobs, proximal, behavior, advantages, mask=None):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    learning = tensor(logprobs).requires_grad_()
    return PolicyTerms(
        logprobs=learning,
        proximal_logprobs=learning.detach() if proximal is None else tensor(proximal),
        behavior_logprobs=tensor(behavior),
        advantages=tensor(advantages),
        mask=torch.ones(len(logprobs), dtype=torch.bool) if mask is None else torch.tensor(mask),
        row_index=torch.zeros(len(logprobs), dtype=torch.int64),
        rows=1,
    )


@pytest.fixture(scope="session")
def make_terms():
    return _make_terms


@pytest.fixture(scope="session")
def loops():
    """The module of scalar loops."""
    return scalar_loops


def _make_sequences(sequences):
    """Terms of sequences of (learned, logprob, proximal, behavior, advantage), float64."""
    rows = [token for sequence in sequences for token in sequence]
    mask, *columns = (list(column) for column in zip(*rows, strict=True))
    terms = _make_terms(*columns, mask)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    row_index = torch.repeat_interleave(torch.arange(len(sequences)), lengths)
    return replace(terms, row_index=row_index, rows=len(sequences))


@pytest.fixture(scope="session")
def make_sequences():
    return _make_sequences


@pytest.fixture
def rollouts(make_batch):
    return make_rollouts(make_batch)
