"""Everything that areal promises of such components, inherited."""

import json
from typing import ClassVar

from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    DatasetSuite,
    EnvironmentSuite,
    GroupFilterSuite,
    PluginSuite,
    PolicyLossSuite,
    RewardShapingSuite,
    RewardSuite,
    TrackerSuite,
    WorkflowSuite,
)


class TestPlugin(PluginSuite):
    plugin = "example"


class TestBrevity(RewardSuite):
    component = "example/brevity"
    settings: ClassVar = {"free_tokens": 3}
    examples = (("", 1.0), ("abc", 1.0), ("abcdefg", 0.5))

    def test_an_answer_that_was_cut_off_is_worth_nothing(self):
        assert self.score("abc", finish_reason="length") == 0


class TestDoublings(DatasetSuite):
    component = "example/doublings"
    settings: ClassVar = {"count": 20}
    keys = ("prompt", "answer")


class TestSelfCheck(WorkflowSuite):
    component = "example/self_check"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})


class TestSecondChances(EnvironmentSuite):
    component = "example/second_chances"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})
    completions = ("5", "7", "8")


class TestRanked(RewardShapingSuite):
    component = "example/ranked"
    examples = (((0.0, 3.0, 0.5), (0.0, 1.0, 0.5)), ((2.0, 2.0), (0.0, 0.0)))


class TestNotSolved(GroupFilterSuite):
    component = "example/not_solved"
    settings: ClassVar = {"share": 0.5}
    examples = (((1.0, 1.0, 0.0), None), ((1.0, 0.0), (1.0, 0.0)))


class TestMetricLines(TrackerSuite):
    component = "example/metric_lines"

    def logged(self, run_dir):
        lines = map(json.loads, (run_dir / "lines.jsonl").read_text().splitlines())
        return {(line["step"], name): value for line in lines for name, value in line.items()}


class TestBetterOrWorse(AdvantageSuite):
    component = "example/better_or_worse"


class TestCappedReinforce(PolicyLossSuite):
    component = "example/capped_reinforce"


class TestBetter(AlgorithmSuite):
    component = "example/better"
