"""Everything that areal promises of such components, inherited."""

import torch
from areal_homemade.config import DPOSettings
from areal_homemade.preferences import DPO

from areal_testing.conformance import AdvantageSuite, AlgorithmSuite, PolicyLossSuite, make_batch


class TestPPO(AlgorithmSuite):
    component = "homemade/ppo"


class TestDistillation(AlgorithmSuite):
    component = "homemade/distill"


class TestClipped(PolicyLossSuite):
    component = "homemade/clipped"


class TestGAE(AdvantageSuite):
    component = "homemade/gae"


class TestDPO(AlgorithmSuite):
    component = "homemade/dpo"
    is_policy_gradient = False

    def make_batch(self):
        """Six pairs whose sides stand apart."""
        batch = make_batch()
        return batch.with_units(torch.arange(12) % 6)

    def test_a_pair_by_hand(self):
        """At the reference the loss is log 2, and the gradient pulls the chosen answer up and the rejected one down."""
        batch, mask = self.make_batch(), self.make_batch()["loss_mask"]
        algorithm = DPO(DPOSettings(beta=0.5))
        now = torch.zeros(batch.token_count, requires_grad=True)
        batch = batch.with_tokens(reference_logprobs=torch.zeros(batch.token_count))
        result = algorithm.loss(batch.with_sequences(share=torch.full((12,), 1 / 6)), {"logprobs": now})
        torch.testing.assert_close(result.loss, torch.tensor(2.0).log())
        result.loss.backward()
        sign = torch.where(batch.tokens.row_index < 6, -1.0, 1.0)
        torch.testing.assert_close(now.grad, torch.where(mask, sign * 0.5 * 0.5 / 6, 0.0))
