"""Two ranks with tensor or expert parallelism compute what one does, or refuse a family with the reason of the page."""

import models_page
import pytest
import small_models
import two_ranks

FAST = ("cohere", "granite", "nanochat", "qwen3_next")
"""Shifted, scaled and capped logits whose vocabulary ranks divide; and experts beside a mixer."""
PAGE = models_page.read()


def check(results):
    for family, found in results.items():
        cells = models_page.rank_cell(found["tensor"]), models_page.rank_cell(found["expert"])
        assert cells == (PAGE[family].tensor, PAGE[family].expert), family


def test_scaled_shifted_and_capped_logits_of_a_divided_vocabulary(tmp_path):
    results = two_ranks.measure(FAST, tmp_path)
    check(results)
    assert [PAGE[family].tensor.text for family in FAST[:3]] == ["yes"] * 3
    assert PAGE["qwen3_next"].expert.text == "yes"
    assert "does not divide" not in (tmp_path / "rank0.log").read_text(), "each rank computes all of the vocabulary"


@pytest.mark.nightly
def test_each_family_is_exact_or_refused(tmp_path):
    results = two_ranks.measure(small_models.FAMILIES, tmp_path)
    assert results.keys() == small_models.FAMILIES.keys()
    check(results)
