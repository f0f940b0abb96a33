"""The probe's tolerance, with a module whose logits and errors are made up: rounding differs from device to device."""

from types import SimpleNamespace

import pytest
import torch

from areal_core.errors import RunError
from areal_fsdp.models.final_logits import FinalLogits
from areal_fsdp.models.probe import (
    Expected,
    UnfitError,
    check_values,
    expected_outputs,
    probes,
    refuse_infinite_outputs,
    tolerance_of,
)

VOCABULARY = 512


class MadeUp:
    """A model with logits of a given size, and an engine that is off by a share of each."""

    head_name = ""
    temperature = 1.0

    def __init__(self, largest, rounding=0.0, factor=1.0):
        text = SimpleNamespace(model_type="made-up", vocab_size=VOCABULARY, max_position_embeddings=64)
        self.model = SimpleNamespace(config=SimpleNamespace(model_type="made-up", get_text_config=lambda: text))
        generator = torch.Generator().manual_seed(1)
        self._logits = largest * (2 * torch.rand(VOCABULARY, VOCABULARY, generator=generator) - 1)
        self._off = factor + rounding * (2 * torch.rand(VOCABULARY, VOCABULARY, generator=generator) - 1)

    def unpacked(self, sequences):
        return self._logits[sequences], FinalLogits()

    def layout(self, lengths, device):
        return None

    def __call__(self, ids, layout, targets, outputs):
        logits = (self._logits * self._off)[ids]
        return {"logprobs": torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]}


def check(made, dtype):
    device = torch.device("cpu")
    expected = expected_outputs(made, device)
    check_values(made, probes(made, device), expected, tolerance_of(dtype, expected))


@pytest.mark.parametrize("largest", [3.0, 33.0])
def test_rounding_in_bfloat16_passes_whatever_the_size_of_logits(largest):
    """SmolLM2 has logits up to 33, and its log-probabilities on a GPU were 0.2 and more apart."""
    check(MadeUp(largest, rounding=0.02), torch.bfloat16)


def test_experts_that_rounding_turns_over_move_single_tokens_in_half_precision_alone():
    """A gpt-oss was 0.37 off in one of 17 tokens, and computed padded rows for it: out of memory."""
    wanted = [torch.zeros(9), torch.zeros(5), torch.zeros(3)]
    computed = [each.clone() for each in wanted]
    computed[0][:4] = 5.0
    half, exact = (tolerance_of(dtype, Expected(wanted, FinalLogits())) for dtype in (torch.bfloat16, torch.float32))
    assert half.distance(computed, wanted) == 0
    assert exact.distance(computed, wanted) == 5
    computed[2][:] = 1.0
    assert half.distance(computed, wanted) == 1, "one sequence of three is wrong"
    computed[0][0] = torch.nan
    assert half.distance(computed, wanted) == torch.inf


@pytest.mark.parametrize("largest", [3.0, 33.0])
def test_logits_that_are_scaled_are_refused_whatever_their_size(largest):
    with pytest.raises(UnfitError, match="a probe differs from transformers'"):
        check(MadeUp(largest, factor=1.15), torch.bfloat16)


@pytest.mark.parametrize("largest", [float("inf"), 1e39])
def test_what_is_not_finite_is_no_matter_of_the_model_type(largest):
    made = MadeUp(largest)
    made.model.named_parameters = list
    with pytest.raises(RunError, match="'made-up' are not finite, although its weights are: the model, or its adapter"):
        refuse_infinite_outputs(made, torch.float32, expected_outputs(made, torch.device("cpu")))


def test_in_float32_rounding_of_that_size_is_refused():
    with pytest.raises(UnfitError, match="a probe differs from transformers'"):
        check(MadeUp(33.0, rounding=0.001), torch.float32)
