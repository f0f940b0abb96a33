"""The suites that every plugin author inherits, on everything that this plugin supplies."""

from dataclasses import replace

import pytest
import torch

from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    BatchTransformSuite,
    CorrectionSuite,
    GroupFilterSuite,
    PolicyLossSuite,
    RegularizerSuite,
    RewardSuite,
)

pytestmark = pytest.mark.slow


class TestGroupNormalized(AdvantageSuite):
    component = "grpo/group_normalized"


class TestGroupCentered(AdvantageSuite):
    component = "grpo/group_centered"


class TestLeaveOneOut(AdvantageSuite):
    component = "grpo/leave_one_out"


class TestZeroVariance(GroupFilterSuite):
    component = "grpo/zero_variance"
    examples = (([0.0, 0.0], None), ([1.0, 0.0], [1.0, 0.0]), ([1.0], None))


class TestPPOClip(PolicyLossSuite):
    component = "grpo/ppo_clip"


class TestDualClip(PolicyLossSuite):
    component = "grpo/ppo_clip"
    settings = {"clip_low": 0.1, "clip_high": 0.28, "dual_clip": 3.0}  # noqa: RUF012 - read as it is, never changed


class TestReinforce(PolicyLossSuite):
    component = "grpo/reinforce"


class TestGSPO(PolicyLossSuite):
    component = "grpo/gspo"


class TestGMPO(PolicyLossSuite):
    component = "grpo/gmpo"


class TestCISPO(PolicyLossSuite):
    component = "grpo/cispo"


class TestSAPO(PolicyLossSuite):
    component = "grpo/sapo"


class TestDPPO(PolicyLossSuite):
    component = "grpo/dppo"


class TestDPPOByKL(PolicyLossSuite):
    component = "grpo/dppo"
    settings = {"divergence": "kl", "threshold_low": 0.05, "threshold_high": 0.05}  # noqa: RUF012


class TestRolloutImportance(PolicyLossSuite):
    component = "grpo/rollout_importance"


class TestRolloutImportanceWithoutBounds(PolicyLossSuite):
    component = "grpo/rollout_importance"
    settings = {"clip_low": None, "clip_high": None}  # noqa: RUF012


class TestVESPO(PolicyLossSuite):
    component = "grpo/vespo"


class TestScoreCentering(PolicyLossSuite):
    component = "grpo/score_centering"


class TestWeightedScoreCentering(PolicyLossSuite):
    component = "grpo/score_centering"
    settings = {"cap": 2.0}  # noqa: RUF012


class TestTokenTruncate(CorrectionSuite):
    component = "grpo/token_truncate"


class TestTokenMask(CorrectionSuite):
    component = "grpo/token_mask"


class TestSequenceTruncate(CorrectionSuite):
    component = "grpo/sequence_truncate"


class TestGeometricMask(CorrectionSuite):
    component = "grpo/geometric_mask"


class TestProductMask(CorrectionSuite):
    component = "grpo/product_mask"


class TestVeto(CorrectionSuite):
    component = "grpo/veto"


class TestOPSM(CorrectionSuite):
    component = "grpo/opsm"
    settings = {"threshold": 0.1}  # noqa: RUF012


class WeightsOfAMask(TestOPSM):
    """Broken: its settings declare a mask, and it returns numbers."""

    __test__ = False

    def make(self):
        mask = super().make()
        return lambda terms: (mask(terms)[0].float(), {})


def test_a_mask_that_returns_weights_is_caught():
    with pytest.raises(AssertionError, match=r"only_masks is True, but the correction returns torch\.float32"):
        WeightsOfAMask().test_one_weight_for_each_token()


class TestKPop(CorrectionSuite):
    component = "grpo/kpop"


class TestIPOMask(CorrectionSuite):
    component = "grpo/ipo_mask"


class TestM2POTransform(BatchTransformSuite):
    component = "grpo/m2po"


class TestEntropyTarget(BatchTransformSuite):
    component = "grpo/entropy_target"
    settings = {"target": 1.0}  # noqa: RUF012


class TestReferenceKL(RegularizerSuite):
    component = "grpo/reference_kl"


class TestEntropyBonus(RegularizerSuite):
    component = "grpo/entropy_bonus"


class TestAdaptiveEntropy(RegularizerSuite):
    component = "grpo/adaptive_entropy"

    def make(self):
        regularizer = super().make()
        return lambda terms: regularizer(
            replace(terms, columns={**terms.columns, "entropy_coefficient": torch.full(terms.mask.shape, 0.3)})
        )


class TestGRPO(AlgorithmSuite):
    component = "grpo/grpo"


class TestDrGRPO(AlgorithmSuite):
    component = "grpo/dr_grpo"
    settings = {"loss_aggregation": {"length": 16}}  # noqa: RUF012


class TestRLOO(AlgorithmSuite):
    component = "grpo/rloo"


class TestDAPO(AlgorithmSuite):
    component = "grpo/dapo"


class TestGSPOAlgorithm(AlgorithmSuite):
    component = "grpo/gspo"


class TestCISPOAlgorithm(AlgorithmSuite):
    component = "grpo/cispo"


class TestSAPOAlgorithm(AlgorithmSuite):
    component = "grpo/sapo"


class TestReinforcePP(AlgorithmSuite):
    component = "grpo/reinforce_pp"


class TestLitePPO(AlgorithmSuite):
    component = "grpo/lite_ppo"


class TestM2PO(AlgorithmSuite):
    component = "grpo/m2po"


class TestDPPOAlgorithm(AlgorithmSuite):
    component = "grpo/dppo"


class TestPPO(AlgorithmSuite):
    component = "grpo/ppo"


class TestGRPOWithEverything(AlgorithmSuite):
    """All that can be switched on; the penalty towards the reference has a gradient of its own."""

    component = "grpo/grpo"
    is_policy_gradient = False
    settings = {  # noqa: RUF012
        "corrections": [{"type": "grpo/token_mask", "low": 0.7, "high": 1.5}],
        "regularizers": ["grpo/reference_kl", "grpo/entropy_bonus"],
        "policy_loss": {"type": "grpo/ppo_clip", "clip_high": 0.28, "dual_clip": 3},
        "loss_aggregation": "core/sequence_mean",
    }


class TestRightResult(RewardSuite):
    component = "grpo/right_result"
    row = {"prompt": "47+38=", "answer": "85"}  # noqa: RUF012
    examples = (("85", 1), ("{7+8=15;4+3+1=8}85", 1), ("{7+8=15;4+3+1=8}84", 0), ("", 0), ("{85}", 0))

    def test_an_answer_that_was_cut_off_is_not_right(self):
        assert self.score("85", finish_reason="length") == 0


class TestShowsWorking(RewardSuite):
    component = "grpo/shows_working"
    row = {"prompt": "47+38=", "answer": "85"}  # noqa: RUF012
    examples = (("85", 0), ("{7+8=15;4+3+1=8}85", 1))
