import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from areal_rewards.config import FormatSettings, LengthPenaltySettings
from areal_rewards.text import exact_match, length_penalty, matches_format


@pytest.mark.parametrize(
    ("completion", "answer", "settings", "reward"),
    [
        ("42", "42", {}, 1),
        (" 42\n", "42 ", {}, 1),
        ("43", "42", {}, 0),
        ("42", 42, {}, 1),
        ("The answer is 42", "42", {}, 0),
        ("{7+8=15}85", "85", {"after": "}"}, 1),
        ("{1}{2} 85", "85", {"after": "}"}, 1),
        ("85", "85", {"after": "}"}, 0),
        ("Paris", "paris", {}, 0),
        ("Paris", "paris", {"ignore_case": True}, 1),
    ],
)
def test_exact_match(completion, answer, settings, reward):
    assert exact_match(completion, answer, **{"after": None, "ignore_case": False, **settings}) == reward


THINKING = r"<think>.*</think>\s*<answer>\d+</answer>"


@pytest.mark.parametrize(
    ("completion", "whole", "reward"),
    [
        ("<think>a\nb</think>\n<answer>4</answer>", True, 1),
        ("so <think>a</think><answer>4</answer>", True, 0),
        ("so <think>a</think><answer>4</answer>", False, 1),
        ("<think>a</think><answer>four</answer>", False, 0),
    ],
)
def test_format(completion, whole, reward):
    assert matches_format(completion, pattern=THINKING, whole=whole) == reward


def test_a_pattern_that_is_none_is_refused():
    with pytest.raises(ValidationError, match="is not a regular expression: missing"):
        FormatSettings(pattern="(")


def test_length_penalty_of_dapo():
    """The paper's own figures: expected 16,384 tokens, a cache of 4,096 behind them."""
    reward = {n: length_penalty(range(n), longest=20480, margin=4096) for n in (1, 16384, 18432, 20480, 30000)}
    assert reward == {1: 0, 16384: 0, 18432: -0.5, 20480: -1, 30000: -1}


@given(st.integers(0, 300), st.integers(1, 200), st.integers(1, 200))
def test_length_penalty_is_the_papers_three_cases(length, first, second):
    longest, margin = max(first, second), min(first, second)
    expected = longest - margin
    if length <= expected:
        naive = 0.0
    elif length <= longest:
        naive = (expected - length) / margin
    else:
        naive = -1.0
    assert length_penalty(range(length), longest=longest, margin=margin) == pytest.approx(naive)


def test_a_margin_beyond_the_length_is_refused():
    with pytest.raises(ValidationError, match="margin must be at most longest"):
        LengthPenaltySettings(longest=10, margin=11)
