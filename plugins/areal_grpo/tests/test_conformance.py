"""The suites that every plugin author inherits, on everything that this plugin supplies."""

from areal_core.testing.conformance import AdvantageSuite, AlgorithmSuite, CorrectionSuite, FilterSuite, PolicyLossSuite


class TestGroupNormalised(AdvantageSuite):
    component = "grpo/group_normalised"


class TestGroupCentred(AdvantageSuite):
    component = "grpo/group_centred"


class TestLeaveOneOut(AdvantageSuite):
    component = "grpo/leave_one_out"


class TestZeroVariance(FilterSuite):
    component = "grpo/zero_variance"
    examples = (([0.0, 0.0], False), ([1.0, 0.0], True), ([1.0], False))


class TestPPOClip(PolicyLossSuite):
    component = "grpo/ppo_clip"


class TestDualClip(PolicyLossSuite):
    component = "grpo/ppo_clip"
    settings = {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}  # noqa: RUF012 - read as it is, never changed


class TestReinforce(PolicyLossSuite):
    component = "grpo/reinforce"


class TestTokenTruncate(CorrectionSuite):
    component = "grpo/token_truncate"


class TestTokenMask(CorrectionSuite):
    component = "grpo/token_mask"


class TestGRPO(AlgorithmSuite):
    component = "grpo/grpo"


class TestDrGRPO(AlgorithmSuite):
    component = "grpo/dr_grpo"
    settings = {"aggregation": {"length": 16}}  # noqa: RUF012


class TestRLOO(AlgorithmSuite):
    component = "grpo/rloo"


class TestSFT(AlgorithmSuite):
    component = "grpo/sft"
    is_policy_gradient = False
