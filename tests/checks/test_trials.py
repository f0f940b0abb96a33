"""The user's own rewards and algorithms, tried before a run: what is a problem, what is a note, and what is neither."""

from __future__ import annotations

import re

import pytest

from areal_core.checks.algorithm_trial import try_algorithm
from areal_core.checks.data import DataReport
from areal_core.checks.rewards import reward_arguments, reward_problems
from areal_core.config import resolve

RIGHT = """\
import torch
class engine: ...
def rows(): ...
def reward(completion): return 1.0
def plain(batch): return batch["reward"]
def loss(terms): return -terms.logprobs * terms.advantages, {}
def weights(minibatch): return minibatch["loss_mask"] / minibatch["loss_mask"].sum()
def extra(terms): return -0.1 * terms.entropy, {"bonus": terms.entropy}
def column(batch, context): return {"half": batch["reward"] / 2}
"""
CONFIG = """\
steps: 1
model: {path: nowhere}
dataset: parts.py:rows
train_engine: parts.py:engine
workflow: single_turn
inference_engine: parts.py:engine
rewards: ["parts.py:reward"]
algorithm:
  type: policy_gradient
  advantage: "parts.py:plain"
  policy_loss: "parts.py:loss"
  regularizers: ["parts.py:extra"]
  batch_transforms: ["parts.py:column"]
  loss_aggregation: "parts.py:weights"
"""


@pytest.fixture
def config(tmp_path):
    """The config with these parts in place of the right ones."""

    def read(code: str, *overrides: str):
        (tmp_path / "parts.py").write_text(f"{RIGHT}\n{code}\n")
        (tmp_path / "run.yaml").write_text(CONFIG)
        return resolve(tmp_path / "run.yaml", overrides=overrides).config

    return read


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", ""),
        (
            "def plain(batch): return batch['valeus'] - batch['reward']",
            r"no key 'valeus'; it has .* \(parts.py:\d+\); outputs of models are in the batch only if `needs` declares",
        ),
        ("def loss(terms): return -terms.columns['reference_logprobs'], {}", r"KeyError: 'reference_logprobs' \(parts"),
        ("def loss(terms): return -terms.logprobs * {}[3], {}", r"KeyError: 3 \(parts.py"),
        (
            "def plain(batch): return batch['reward'].view(16, -1)",
            r"the advantage '.*parts.py:plain' gave a tensor of shape \(16, 8\), and must give \(128,\), one value "
            r"for each sequence or \(\d+,\), one value for each token",
        ),
        ("def plain(batch): return 1.0", r"advantage '.*parts.py:plain' gave 1.0, and must give \(128,\), one value"),
        ("def plain(batch): return {'returns': batch['reward']}", r"the advantage '.*plain' gave None, and must give"),
        (
            "def plain(batch):\n    rewards = batch['reward'].view(16, -1)\n    return (rewards / rewards.std(1, "
            "keepdim=True) * 0 / (rewards - rewards[:, :1]).abs().sum(1, keepdim=True)).flatten()",
            r"the advantage '.*parts.py:plain' gave \d+ values that are NaN or infinite, of \d+ tokens",
        ),
        (
            "def loss(terms): return terms.logprobs.mean(), {}",
            r"the policy loss '.*:loss' gave a tensor of shape \(\), and must give \(\d+,\), one value for each token",
        ),
        (
            "def loss(terms): return terms.logprobs",
            r"the policy loss '.*:loss' gave no pair of a tensor and",
        ),
        (
            "def loss(terms): return terms.logprobs, {'x': terms.logprobs.sum()}",
            r"the policy loss '.*:loss' gave a",
        ),
        (
            "def extra(terms): return terms.logprobs[None], {}",
            r"the regularizer '.*:extra' gave a tensor of shape \(1",
        ),
        (
            "def weights(batch): return batch['reward']",
            r"the loss aggregation '.*:weights' gave a tensor of shape ",
        ),
        ("def column(batch, context): return {'a': torch.ones(3)}", "column 'a' has 3 values for "),
        (
            "def loss(terms): return terms.logprobs.log(), {}",
            "the loss of actor is nan; check algorithm",
        ),
        (
            "def loss(terms): return (terms.logprobs * 0).sqrt(), {}",
            "the loss of actor is .*, and its gradient for ",
        ),
        (
            "def loss(terms):\n    return terms.logprobs + torch.ones(3), {}",
            r"The size of tensor a .* \(parts.py:\d+\)",
        ),
    ],
)
def test_an_algorithm_of_ones_own_is_tried(config, code, told):
    pytest.importorskip("areal_vllm", reason="the first-party plugins are not installed")
    problems, notes = [], []
    try_algorithm(config(code, "inference_engine=vllm", "plugins=[vllm]"), problems, notes)
    assert bool(problems) == bool(told), problems
    assert re.search(told, "".join(problems)), problems
    assert notes == []


@pytest.mark.parametrize(
    ("code", "overrides", "told"),
    [
        ("def plain(batch): return batch['mine']", (), r"the batch has no key 'mine'; it has .* \(parts.py:\d+\)"),
        ("def plain(batch): return batch['reward.brief']", ("inference_engine=vllm",), "no key 'reward.brief'"),
        ("def plain(batch): return batch['turn_rewards']", ("inference_engine=vllm",), "no key 'turn_rewards'"),
        (
            "def column(batch, context): return context.forward('actor', batch, ['hidden'])",
            ("inference_engine=vllm",),
            "was not tried to its end, because the made-up models have no output hidden$",
        ),
    ],
)
def test_what_could_not_be_tried_is_noted(config, code, overrides, told):
    """An engine of the user's own may bring any column; of rewards, workflows and wide outputs nothing is made up."""
    pytest.importorskip("areal_vllm", reason="the first-party plugins are not installed")
    problems, notes = [], []
    try_algorithm(config(code, "plugins=[vllm]", *overrides), problems, notes)
    assert problems == []
    (note,) = notes
    assert note.startswith("algorithm.batch_transforms.0 (")
    assert re.search(told, note)


def test_parts_of_plugins_are_not_tried_and_a_large_batch_costs_little(config):
    problems, notes = [], []
    try_algorithm(config("", "rollout.batch_size=256", "rollout.group_size=16"), problems, notes)
    assert (problems, notes) == ([], [])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("", ""),
        (
            "def reward(completion): return [1.0]",
            r"reward 'reward' returned \[1.0\] \(list\); it must return a finite",
        ),
        ("def reward(completion): return None", "None for the first 2 rows, and it has no return with a value"),
        ("def reward(completion): len(completion)", "and it has no return with a value"),
        ("def reward(answer): return None if answer else 1.0", "the first 2 rows, and no other reward scores them"),
        ("def reward(answer): return None if answer == 2 else 1.0", ""),
        ("def reward(completion): return int(completion)", r"raised ValueError: invalid literal .* \(parts.py:\d+\)"),
        (
            "def reward(prompt, answer, row): return 1 / (row['answer'] - 2)",
            r"ZeroDivisionError.* tried on row 1",
        ),
        ("def reward(completion): raise ConnectionRefusedError", ""),
        ("def reward(completion, anser): return 1.0", ""),  # reported for every data set, see argument_problems
        ("async def reward(completion): return 1 / 0", ""),
        ("class Unreachable(Exception): ...\ndef reward(completion): raise Unreachable", ""),
    ],
)
def test_a_reward_of_ones_own_is_tried(config, code, told):
    rows = [{"prompt": "1", "answer": 1}, {"prompt": "2", "answer": 2}]
    problems = [*reward_problems(config(code), [DataReport("dataset", first_rows=rows)])]
    assert bool(problems) == bool(told), problems
    assert re.search(told, "".join(problems)), problems


def test_a_reward_that_hangs_is_named(config):
    code = "import time\ndef reward(completion): time.sleep(900)"
    reports = [DataReport("dataset", first_rows=[{"prompt": "1"}])]
    (problem,) = reward_problems(config(code, "rollout.reward_timeout_s=1"), reports)
    assert "reward 'reward' raised RuntimeError: it took longer than rollout.reward_timeout_s" in problem
    assert "tried on row 0 of the data set" in problem


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("def reward(prompt, row, anser, level='easy', *, finish_reason): ...", {"anser": True, "level": False}),
        (
            "class reward:\n    def __call__(self, solution, completion, level=1): ...",
            {"solution": True, "level": False},
        ),
        ("def reward(completion, answer, *more, **others): ...", {"answer": True}),
        ("def reward(answer, *, scale, limit=2): ...", {"answer": True, "scale": True}),
    ],
)
def test_the_arguments_that_only_rows_can_supply(config, code, arguments):
    assert reward_arguments(config(code).rewards[0]) == arguments


def test_what_the_config_sets_is_not_reward_arguments(config):
    chosen = config("def reward(answer, *, scale): ...", "rewards.0.scale=2").rewards[0]
    assert reward_arguments(chosen) == {"answer": True}
