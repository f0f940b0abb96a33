"""Everything that areal promises of such components, inherited."""

from typing import ClassVar

from areal_core.testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    DatasetSuite,
    PluginSuite,
    PolicyLossSuite,
    RewardSuite,
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


class TestBetterOrWorse(AdvantageSuite):
    component = "example/better_or_worse"


class TestCappedReinforce(PolicyLossSuite):
    component = "example/capped_reinforce"


class TestBetter(AlgorithmSuite):
    component = "example/better"
