"""The suite that every author of a reward inherits, on every reward of this plugin."""

import pytest

from areal_testing.conformance import DatasetSuite, RewardSuite


class TestExactMatch(RewardSuite):
    component = "rewards/exact_match"
    examples = (("8", 1.0), (" 8\n", 1.0), ("The answer is 8", 0.0))


class TestFormat(RewardSuite):
    component = "rewards/format"
    settings = {"pattern": r"<think>.*</think>.*"}  # noqa: RUF012 - read as it is, never changed
    examples = (("<think>4 + 4</think>8", 1.0), ("8", 0.0))


class TestLengthPenalty(RewardSuite):
    component = "rewards/length_penalty"
    settings = {"longest": 20, "margin": 10}  # noqa: RUF012
    examples = (("8", 0.0), ("x" * 15, -0.5), ("x" * 50, -1.0))


@pytest.mark.slow
class TestMathVerify(RewardSuite):
    component = "rewards/math_verify"
    examples = (("The answer is \\boxed{8}", 1.0), ("16/2", 1.0), ("9", 0.0), ("", 0.0))

    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("math_verify")


@pytest.mark.slow
class TestReasoningGym(RewardSuite):
    component = "rewards/reasoning_gym"
    row = {  # noqa: RUF012
        "prompt": "Calculate 4 + 4.",
        "task": {"name": "basic_arithmetic", "size": 3, "seed": 1, "settings": {"max_terms": 2}, "index": 0},
    }
    examples = (("nonsense", 0.0),)

    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("reasoning_gym")


class TestJSONLines(DatasetSuite):
    component = "rewards/jsonl"

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "tags": ["x"]}\n{"prompt": "b"}\n')
        self.settings = {"paths": [str(tmp_path / "rows.jsonl")]}


@pytest.mark.slow
class TestReasoningGymTasks(DatasetSuite):
    component = "rewards/reasoning_gym"
    settings = {"task": "chain_sum", "size": 20}  # noqa: RUF012  pytest makes one object a test

    @pytest.fixture(autouse=True)
    def _library(self):
        pytest.importorskip("reasoning_gym")
