"""The suites that every plugin author inherits, on everything that this plugin supplies."""

from dataclasses import replace

import pytest
import torch

from areal_core.data import Ragged
from areal_testing.conformance import (
    AdvantageSuite,
    AlgorithmSuite,
    BatchTransformSuite,
    ExampleTokenizerSuite,
    PolicyLossSuite,
    RewardSuite,
    WorkflowSuite,
    make_batch,
)


def make_pairs():
    """The suites' batch in six units of two sequences that stand apart, the chosen one not always first."""
    batch = make_batch()
    rows = torch.arange(len(batch))
    pair = rows % 6
    batch = batch.with_sequences(is_chosen=(rows < 6) ^ (pair % 2 == 1), margin=pair / 4, group_id=100 - pair)
    return batch.with_units(pair)


def with_teacher_prompts(batch):
    """The batch with a teacher's prompt of 0 to 3 tokens for each sequence."""
    lengths = torch.arange(len(batch)) % 4
    tokens = {"teacher_prompt_ids": torch.arange(int(lengths.sum())) % 61}
    return replace(batch, multimodal={"teacher": Ragged(lengths, tokens)})


class PairSuite(AlgorithmSuite):
    is_policy_gradient = False

    def make_batch(self):
        return make_pairs()


class TestSFT(AlgorithmSuite):
    component = "finetuning/sft"
    is_policy_gradient = False


class TestGKD(AlgorithmSuite):
    component = "finetuning/gkd"
    is_policy_gradient = False


class TestGKDOnRows(TestGKD):
    settings = {  # noqa: RUF012
        "example_tokenizer": "finetuning/conversations",
        "beta": 0.1,
        "loss_aggregation": "core/sequence_mean",
    }


class TestPairsAreNotLearnedAsSingleSequences:
    @pytest.mark.parametrize("suite", [TestSFT, TestGKD])
    def test_they_are_refused(self, suite):
        with pytest.raises(
            ValueError, match="the rejected would be learned too: choose an example tokenizer of one sequence"
        ):
            suite().make().prepare(make_pairs(), suite().context())


class TestDPO(PairSuite):
    component = "finetuning/dpo"


class TestConservativeDPO(PairSuite):
    component = "finetuning/dpo"
    settings = {"label_smoothing": 0.2, "length_normalized": True, "beta": 2.0}  # noqa: RUF012


class TestReferenceFreeDPO(PairSuite):
    component = "finetuning/dpo"
    settings = {"reference_free": True}  # noqa: RUF012


class TestIPO(PairSuite):
    component = "finetuning/ipo"


class TestSimPO(PairSuite):
    component = "finetuning/simpo"


class TestORPO(PairSuite):
    component = "finetuning/orpo"


class TestKTO(AlgorithmSuite):
    component = "finetuning/kto"
    settings = {"undesirable_weight": 1.5}  # noqa: RUF012
    is_policy_gradient = False

    def make_batch(self):
        batch = make_batch()
        rows = torch.arange(len(batch))
        return batch.with_sequences(is_desirable=rows % 3 > 0, group_id=100 - rows)


class TestRewardModel(PairSuite):
    component = "finetuning/reward_model"
    settings = {"centering": 0.1}  # noqa: RUF012
    learns_in_mask = False


class TestDistill(AlgorithmSuite):
    component = "finetuning/distill"


class TestSDPO(AlgorithmSuite):
    component = "finetuning/sdpo"

    def make_batch(self):
        return with_teacher_prompts(make_batch())


class TestSDPOWithRewards(TestSDPO):
    settings = {  # noqa: RUF012
        "batch_transforms": [{"type": "finetuning/self_teacher", "ema_decay": None}],
        "advantage": {"type": "finetuning/self_distillation", "reward_advantage": "grpo/leave_one_out"},
    }


class TestSelfTeacher(BatchTransformSuite):
    component = "finetuning/self_teacher"

    def make_batch(self):
        return with_teacher_prompts(super().make_batch())


class TestSelfDistillationWorkflow(WorkflowSuite):
    component = "finetuning/self_distillation"
    settings = {"prompt_template": "{solution}{feedback}\n{prompt}"}  # noqa: RUF012

    def make_tokenizer(self):
        tokenizer = super().make_tokenizer()
        tokenizer.model_max_length = 200
        return tokenizer


class TestSelfDistillationAdvantage(AdvantageSuite):
    component = "finetuning/self_distillation"
    settings = {"reward_advantage": "grpo/group_normalized", "reward_weight": 0.3}  # noqa: RUF012

    def make_batch(self):
        batch = super().make_batch()
        return batch.with_tokens(teacher_logprobs=batch["fake_output/reference"])


class TestSelfDistillationLoss(PolicyLossSuite):
    component = "finetuning/self_distillation"

    def make(self):
        loss = super().make()
        return lambda terms: loss(
            replace(terms, columns={**terms.columns, "teacher_logprobs": terms.proximal_logprobs - 0.5})
        )


class TestTeacherKL(AdvantageSuite):
    component = "finetuning/teacher_kl"


class TestDistillation(PolicyLossSuite):
    component = "finetuning/distillation"


class TestNoReward(RewardSuite):
    component = "finetuning/no_reward"
    row = {"prompt": "2+2="}  # noqa: RUF012
    examples = (("4", 0), ("", 0))


class TestPlace(RewardSuite):
    component = "finetuning/place"
    settings = {"key": "teacher", "values": ["math", "code"]}  # noqa: RUF012
    row = {"prompt": "2+2=", "teacher": "code"}  # noqa: RUF012
    examples = (("4", 1), ("", 1))


class TestConversations(ExampleTokenizerSuite):
    component = "finetuning/conversations"
    rows = ({"prompt": "4+4=", "completion": "8"}, {"prompt": "a", "completion": "b", "more": [1, 2]})


class TestLabeled(ExampleTokenizerSuite):
    component = "finetuning/labeled"
    rows = (
        {"prompt": "4+4=", "completion": "8", "label": True},
        {"prompt": "a", "completion": "b", "label": 0, "more": [1, 2]},
    )


class TestPreferences(ExampleTokenizerSuite):
    component = "finetuning/preferences"
    sequences = 2
    rows = (
        {"prompt": "4+4=", "chosen": "8", "rejected": "9"},
        {"prompt": "a", "chosen": "long", "rejected": "s"},
    )
