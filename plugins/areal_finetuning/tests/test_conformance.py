"""The suites that every plugin author inherits, on everything that this plugin supplies."""

from areal_core.testing.conformance import AlgorithmSuite


class TestSFT(AlgorithmSuite):
    component = "finetuning/sft"
    is_policy_gradient = False
