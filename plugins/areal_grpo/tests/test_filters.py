import pytest

from areal_grpo.filters import zero_variance


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([0.0, 0.0, 0.0], False), ([1.0, 1.0], False), ([1.0], False), ([0.0, 1.0, 0.0], True), ([0.1, 0.1001], True)],
)
def test_zero_variance(rewards, kept):
    assert zero_variance(rewards) is kept
