"""The probe's tolerance, with a module of artificial logits and errors, because rounding depends on the device."""

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
    """A model with logits of a given size, and an engine with a relative error."""

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
def test_bfloat16_rounding_passes_for_logits_of_any_size(largest):
    """SmolLM2 has logits up to 33, and its log-probabilities on a GPU differed by 0.2 and more."""
    check(MadeUp(largest, rounding=0.02), torch.bfloat16)


def test_single_tokens_may_differ_in_half_precision_only():
    """A gpt-oss differed by 0.37 in one of 17 tokens: it fell back to padded rows and ran out of memory."""
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
def test_wrongly_scaled_logits_of_any_size_are_refused(largest):
    with pytest.raises(UnfitError, match="a probe differs from transformers'"):
        check(MadeUp(largest, factor=1.15), torch.bfloat16)


@pytest.mark.parametrize("largest", [float("inf"), 1e39])
def test_infinite_outputs_are_not_blamed_on_the_model_type(largest):
    made = MadeUp(largest)
    made.model.named_parameters = list
    with pytest.raises(RunError, match="'made-up' are not finite, although its weights are: the model, or its adapter"):
        refuse_infinite_outputs(made, torch.float32, expected_outputs(made, torch.device("cpu")))


def test_bfloat16_rounding_is_refused_in_float32():
    with pytest.raises(UnfitError, match="a probe differs from transformers'"):
        check(MadeUp(33.0, rounding=0.001), torch.float32)
