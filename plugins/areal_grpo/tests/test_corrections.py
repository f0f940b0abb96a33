"""Corrections against scalar loops; they carry no gradient, and mind nothing outside the mask."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_grpo import corrections, sequence_corrections
from areal_grpo.correction_settings import (
    GeometricMaskSettings,
    IPOMaskSettings,
    KPopSettings,
    OPSMSettings,
    ProductMaskSettings,
    SequenceTruncateSettings,
    TokenMaskSettings,
    TokenTruncateSettings,
    VetoSettings,
)

CASES = {
    "token_truncate": (corrections.token_truncate, {"cap": 1.5}, TokenTruncateSettings),
    "token_mask": (corrections.token_mask, {"low": 0.5, "high": 2.1}, TokenMaskSettings),
    "kpop": (corrections.kpop, {"threshold": 0.3}, KPopSettings),
    "sequence_truncate": (sequence_corrections.sequence_truncate, {"cap": 3.3}, SequenceTruncateSettings),
    "geometric_mask": (sequence_corrections.geometric_mask, {"low": 0.7, "high": 1.4}, GeometricMaskSettings),
    "product_mask": (sequence_corrections.product_mask, {"low": 0.3, "high": 3.1}, ProductMaskSettings),
    "veto": (sequence_corrections.veto, {"low": 0.11}, VetoSettings),
    "opsm": (sequence_corrections.opsm, {"threshold": 0.4}, OPSMSettings),
    "ipo_mask": (corrections.ipo_mask, {"threshold": 0.2}, IPOMaskSettings),
}
LOGGED = {
    "token_truncate": "truncated_fraction",
    "token_mask": "masked_fraction",
    "kpop": "kpop_masked_fraction",
    "sequence_truncate": "sequence_truncated_fraction",
    "geometric_mask": "geometric_masked_fraction",
    "product_mask": "product_masked_fraction",
    "veto": "vetoed_fraction",
    "opsm": "opsm_masked_fraction",
    "ipo_mask": "ipo_masked_fraction",
}
MASKS = ("geometric_mask", "product_mask", "veto", "opsm", "ipo_mask")
LOGPROBS = st.floats(-3, -0.01)
TOKEN = st.tuples(st.booleans(), LOGPROBS, LOGPROBS, LOGPROBS, st.floats(-2, 2))
SEQUENCES = st.lists(st.lists(TOKEN, min_size=1, max_size=6), min_size=1, max_size=4)
each_correction = pytest.mark.parametrize("name", CASES)


@pytest.mark.slow
@each_correction
@given(sequences=SEQUENCES)
def test_the_loop_of_the_paper(name, sequences, make_sequences, loops):
    component, settings, _ = CASES[name]
    terms = make_sequences(sequences)
    found, logged = component(terms, **settings)
    assert found.dtype == (torch.bool if name in MASKS else torch.float64)
    assert not found.requires_grad
    expected = []
    for sequence in sequences:
        tokens = [loops.Token(*token[1:]) for token in sequence if token[0]]
        expected += getattr(loops, name)(tokens, **settings) if tokens else []
    wanted = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found[terms.mask].double(), wanted, rtol=1e-10, atol=1e-10)
    share = logged[LOGGED[name]][terms.mask]
    assert torch.equal(share, ((wanted == 0) if "truncate" not in name else (wanted == settings["cap"])).float())


@each_correction
def test_a_correction_in_a_single_update_carries_no_gradient(name, make_terms):
    """There the proximal policy is the current one."""
    terms = make_terms([-1.0, -2.0], None, [-1.5, -0.2], [1.0, 1.0])
    assert not CASES[name][0](terms, **CASES[name][1])[0].requires_grad


@each_correction
@pytest.mark.parametrize("distance", [25.0, 200.0, 1e4, math.inf])
@pytest.mark.parametrize("sign", [1, -1])
def test_policies_far_apart_overflow_nowhere(name, distance, sign, make_terms):
    first, second = (0.0, -distance) if sign > 0 else (-distance, 0.0)
    terms = make_terms([first], [first], [second], [-1.0])
    found, _ = CASES[name][0](terms, **CASES[name][1])
    kept = {"token_truncate": 1.5, "sequence_truncate": 3.3, "veto": 1.0, "opsm": 1.0} if sign > 0 else {}
    shrunk = "truncate" in name and sign < 0
    assert found.item() == pytest.approx(math.exp(-20) if shrunk else kept.get(name, 0.0))


@each_correction
def test_what_stands_outside_the_mask_matters_nowhere(name, make_terms):
    """The first token alone would be kept by all of them."""
    terms = make_terms([-1.0, -math.inf], [-1.0, -math.inf], [-1.0, math.nan], [-1.0, 1.0], [True, False])
    assert CASES[name][0](terms, **CASES[name][1])[0].tolist() == [1.0, 1.0]


@each_correction
def test_certain_tokens_are_on_policy(name, make_terms):
    """Log-probabilities of exactly 0 have complements of exactly 0."""
    terms = make_terms([0.0, 0.0], None, [0.0, 0.0], [-1.0, 1.0])
    assert CASES[name][0](terms, **CASES[name][1])[0].tolist() == [1.0, 1.0]


@each_correction
def test_masks_say_so_in_their_settings(name):
    assert CASES[name][2].only_masks == (name in MASKS)


@pytest.mark.parametrize(("threshold", "weight"), [(0.15, 2.0), (0.14, 0.0)])
def test_kpop_weighs_what_it_keeps(threshold, weight, make_terms):
    """Of the probabilities 1/2 and 1/4 the ratio is 2, and the divergences are 0.1438 and 0.1308."""
    terms = make_terms([-5.0], [math.log(1 / 2)], [math.log(1 / 4)], [1.0])
    found, logged = corrections.kpop(terms, threshold=threshold)
    assert found.item() == pytest.approx(weight)
    assert logged["kpop_masked_fraction"].item() == (weight == 0)


def test_opsm_has_no_default():
    assert OPSMSettings.model_fields["threshold"].is_required()


def test_opsm_sees_the_updates_on_this_batch(make_terms):
    """The distance is to the current policy: the proximal one does not matter."""
    settings = {"threshold": 0.5}
    moved = make_terms([-2.0], [-1.0], [-1.0], [-1.0])
    assert sequence_corrections.opsm(moved, **settings)[0].item() == 0
    back = make_terms([-1.0], [-2.0], [-1.0], [-1.0])
    assert sequence_corrections.opsm(back, **settings)[0].item() == 1


def test_ipo_mask_follows_the_updates_on_this_batch_and_ignores_the_sign_of_the_advantage(make_terms):
    for advantage in (1.0, -1.0):
        columns = [math.log(p) for p in (0.9, 0.2, 4e-4)], [0.0] * 3, [math.log(p) for p in (0.5, 0.6, 1e-4)]
        kept, _ = corrections.ipo_mask(make_terms(*columns, [advantage] * 3), threshold=0.3)
        assert kept.tolist() == [False, False, True], "rare tokens may quadruple"


@pytest.mark.parametrize("settings", [GeometricMaskSettings, ProductMaskSettings, TokenMaskSettings])
def test_bounds_that_would_drop_what_is_on_policy_are_refused(settings):
    with pytest.raises(ValueError, match="low must be at most 1 and high at least 1"):
        settings(low=1.5, high=2.5)
