"""The suites that every plugin author inherits, on advantages, shaping, filters, transforms and auxiliary losses."""

from typing import ClassVar

from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    AuxiliaryLossSuite,
    BatchTransformSuite,
    GroupFilterSuite,
    RewardShapingSuite,
)


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


class TestOptimalTokenBaseline(AdvantageSuite):
    component = "grpo/optimal_token_baseline"
    counts_episodes = False


class TestOptimalTokenBaselineWithATail(AdvantageSuite):
    component = "grpo/optimal_token_baseline"
    settings: ClassVar = {"tail": "return"}
    counts_episodes = False


class TestOptimalTokenBaselineInAnAlgorithm(AlgorithmSuite):
    component = "grpo/rloo"
    settings: ClassVar = {"advantage": "grpo/optimal_token_baseline"}


class TestScoreCenteringInAnAlgorithm(AlgorithmSuite):
    component = "grpo/grpo"
    settings: ClassVar = {"policy_loss": "grpo/score_centering", "corrections": []}


class TestLitePPO(AdvantageSuite):
    component = "grpo/lite_ppo"
    groups_are_independent = False


class TestMaxRL(AdvantageSuite):
    component = "grpo/max_rl"


class TestPassAtK(AdvantageSuite):
    component = "grpo/pass_at_k"


class TestPassAt2(AdvantageSuite):
    component = "grpo/pass_at_k"
    settings: ClassVar = {"k": 2}


class TestGiGPO(AdvantageSuite):
    component = "grpo/gigpo"
    counts_episodes = False


class TestGiGPOWithoutANormalization(AdvantageSuite):
    component = "grpo/gigpo"
    settings: ClassVar = {"normalization": "none", "gamma": 1.0}
    counts_episodes = False


class TestReinforcePPBaseline(AdvantageSuite):
    component = "grpo/reinforce_pp_baseline"
    groups_are_independent = False
    counts_episodes = False


class TestGDPO(AdvantageSuite):
    component = "grpo/gdpo"
    settings: ClassVar = {"weights": {"brief": 0.5}}
    groups_are_independent = False

    def make_batch(self):
        batch = super().make_batch()
        parts = {"reward.right": (batch["reward"] > 0).float(), "reward.brief": batch["reward"].square()}
        return batch.with_sequences(**parts)


class TestGroupNormalizedWithRewardsOfTokens(AdvantageSuite):
    component = "grpo/group_normalized"
    counts_episodes = False  # the suite copies trajectories, and what their tokens earn with them

    def make_batch(self):
        batch = super().make_batch()
        return batch.with_tokens(token_rewards=0.1 * batch["logprobs"])


class TestPPO(AlgorithmSuite):
    """PPO with its critic, out of parts."""

    component = "grpo/grpo"
    settings: ClassVar = {"advantage": "grpo/gae", "auxiliary_losses": ["grpo/value_regression"], "corrections": []}


class TestOverlongPenalty(RewardShapingSuite):
    """The answers of the suite have 1, 2, 3, ... tokens."""

    component = "grpo/overlong_penalty"
    settings: ClassVar = {"max_length": 4, "buffer": 2}
    examples = (([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.5, 0.0, 0.0]),)


class TestLengthPenalty(RewardShapingSuite):
    component = "grpo/length_penalty"
    examples = (([1.0], [1.0]), ([1.0, 1.0, 1.0], [1.5, 1.0, 0.5]), ([0.0, 0.0, 0.0], [0.0, 0.0, -0.5]))


class TestRewardBounds(RewardShapingSuite):
    component = "grpo/reward_bounds"
    settings: ClassVar = {"low": 0.0, "high": 1.0}
    examples = (([-1.0, 0.5, 2.0], [0.0, 0.5, 1.0]),)


class TestMaskTruncated(GroupFilterSuite):
    component = "grpo/mask_truncated"
    examples = (([1.0, 0.0], [1.0, 0.0]),)


class TestPPOWithAPenaltyInTheReward(AlgorithmSuite):
    component = "grpo/grpo"
    settings: ClassVar = {
        "batch_transforms": [
            {"type": "grpo/kl_in_reward", "target": 6.0},
            {"type": "grpo/reward_scaling", "clip": 0.5},
        ],
        "advantage": {"type": "grpo/gae", "level": "turn"},
        "auxiliary_losses": [{"type": "grpo/value_regression", "clip": None}],
        "corrections": [],
    }


class TestKLInReward(BatchTransformSuite):
    component = "grpo/kl_in_reward"


class TestAdaptiveKLInReward(BatchTransformSuite):
    component = "grpo/kl_in_reward"
    settings: ClassVar = {"target": 6.0, "horizon": 50}


class TestRewardScaling(BatchTransformSuite):
    component = "grpo/reward_scaling"
    settings: ClassVar = {"shift": 0.1, "scale": 2.0, "clip": 1.0}


class TestValueRegression(AuxiliaryLossSuite):
    component = "grpo/value_regression"


class TestValueRegressionWithoutAClip(AuxiliaryLossSuite):
    component = "grpo/value_regression"
    settings: ClassVar = {"clip": None}
