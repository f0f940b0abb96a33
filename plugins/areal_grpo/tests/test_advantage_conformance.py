"""The suites that every plugin author inherits, on advantages, stages, group stages and objectives."""

from typing import ClassVar

from areal_core.testing.conformance import AdvantageSuite, AlgorithmSuite


class TestGAE(AdvantageSuite):
    component = "grpo/gae"
    settings: ClassVar = {"whiten": False, "gamma": 0.99}
    counts_episodes = False


class TestGAEOfTurns(AdvantageSuite):
    component = "grpo/gae"
    settings: ClassVar = {"level": "turn"}
    groups_are_independent = False
    counts_episodes = False


class TestReinforcePP(AdvantageSuite):
    component = "grpo/reinforce_pp"
    groups_are_independent = False
    counts_episodes = False


class TestPPO(AlgorithmSuite):
    """PPO with its critic, out of parts."""

    component = "grpo/grpo"
    settings: ClassVar = {"advantage": "grpo/gae", "objectives": ["grpo/value_regression"], "corrections": []}
