"""Everything that areal promises of such components, inherited."""

from typing import ClassVar

from areal_core.testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    AuxiliaryLossSuite,
    BatchTransformSuite,
    DatasetSuite,
    EnvironmentSuite,
    EventsSuite,
    ExampleTokenizerSuite,
    GroupFilterSuite,
    PluginSuite,
    PolicyLossSuite,
    RewardSuite,
    TrackerSuite,
    WorkflowSuite,
)


class TestPlugin(PluginSuite):
    plugin = "outside"


class TestBrevity(RewardSuite):
    component = "outside/brevity"
    settings: ClassVar = {"free_tokens": 3}
    examples = (("", 1.0), ("abc", 1.0), ("abcdefg", 0.5))

    def test_an_answer_that_was_cut_off_is_worth_nothing(self):
        assert self.score("abc", finish_reason="length") == 0


class TestDoublings(DatasetSuite):
    component = "outside/doublings"
    settings: ClassVar = {"count": 20}
    keys = ("prompt", "answer")


class TestSelfCheck(WorkflowSuite):
    component = "outside/self_check"
    rows = ({"prompt": "4+4=", "answer": "8"}, {"prompt": "12-7=", "answer": "5"})


class TestBetterOrWorse(AdvantageSuite):
    component = "outside/better_or_worse"


class TestCappedReinforce(PolicyLossSuite):
    component = "outside/capped_reinforce"


class TestBetter(AlgorithmSuite):
    component = "outside/better"


class TestGuess(EnvironmentSuite):
    component = "outside/guess"
    rows = ({"prompt": "4+4=", "answer": "8"},)
    completions = ("9", "7", "8")


class TestNotSolved(GroupFilterSuite):
    component = "outside/not_solved"
    settings: ClassVar = {"share": 0.5}
    examples = (((0.0, 1.0), (0.0, 1.0)), ((1.0, 1.0), None))


class TestKLInReward(BatchTransformSuite):
    component = "outside/kl_in_reward"


class TestValue(AuxiliaryLossSuite):
    component = "outside/value"


class TestCompletion(ExampleTokenizerSuite):
    component = "outside/completion"
    rows = ({"prompt": "4+4=", "completion": "8"}, {"prompt": "8-4=", "completion": "It is 4."})


class TestLines(TrackerSuite):
    component = "outside/lines"
    settings: ClassVar = {"token": "env:OUTSIDE_TOKEN"}

    def logged(self, run_dir):
        lines = [line.split(" ", 2) for line in (run_dir / "lines.txt").read_text().splitlines()]
        return {(int(step), name): float(value) for step, value, name in lines}


class TestEvents(EventsSuite):
    plugin = "outside"
