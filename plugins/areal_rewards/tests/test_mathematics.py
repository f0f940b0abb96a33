import threading

import pytest

from areal_core.errors import ConfigError
from areal_core.rewards.scoring import RewardSum, WeightedReward

pytest.importorskip("math_verify")

from areal_rewards.mathematics import _parse_answer, math_verify

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("The answer is 42.", "42", 1),
        ("The answer is 41.", "42", 0),
        ("so we get $\\frac{1}{2}$", "0.5", 1),
        ("it is 1/2", "\\frac{1}{2}", 1),
        ("\\boxed{2\\sqrt{3}}", "$\\sqrt{12}$", 1),
        ("$x \\in (-\\infty, 2]$", "(-\\infty, 2]", 1),
        ("\\boxed{\\{1, 2\\}}", "$\\{2, 1\\}$", 1),
        ("It is 1,234 apples", "1234", 1),
        ("I do not know.", "42", 0),
        ("", "42", 0),
        ("\\boxed{7}", 7, 1),
        ("\\boxed{\\frac{", "7", 0),
    ],
)
def test_equality_of_expressions(completion, answer, reward):
    assert math_verify(completion, answer) == reward


@pytest.mark.parametrize(
    "completion",
    [
        "2**9999999999",
        "9^9^9^9",
        "$9^{9^{9^9}}$",
        "$3^{-99999999}$",
        "\\boxed{9999999!}",
        "$(1+x)^{99999}$",
        "$\\sin(10^{400000})$",
        "$(3!)!!^{9}$",
        "$x^{10^{9999999}}$",
        "\\boxed{1e999999999}",
        "$2^{\\infty}$",
        "$2^{1/0}$",
    ],
)
def test_numbers_beyond_all_bounds_are_wrong_and_not_worked_out(completion):
    assert math_verify(completion, "8") == 0


def test_large_numbers_within_bounds_are_compared():
    assert math_verify("\\boxed{2^{2^5}}", "4294967296") == 1
    assert math_verify("\\boxed{10!}", "3628800") == 1
    assert math_verify("$(x+1)^2$", "$x^2+2x+1$") == 1
    assert math_verify("$2^{2023}$", "$2 \\cdot 2^{2022}$") == 1


def test_an_answer_without_mathematics_is_an_error_and_no_silent_zero():
    with pytest.raises(ValueError, match="the row's answer, '', has no expression that math-verify can read"):
        math_verify("42", "")


def test_it_works_in_a_thread_where_signals_do_not():
    found = []
    thread = threading.Thread(target=lambda: found.append(math_verify("\\boxed{4}", "4")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_a_missing_library_names_its_extra(without):
    _parse_answer.cache_clear()
    without("math_verify")
    with pytest.raises(
        ConfigError, match=r"math_verify, which is not installed: pip install './plugins/areal_rewards\[math\]'"
    ):
        math_verify("1", "1")


def test_the_runtime_calls_it_with_the_rows_answer():
    rewards = RewardSum([WeightedReward("right", math_verify, 2.0)])
    assert rewards({"completion": "It is 3", "row": {"answer": "3"}, "prompt": ""}).value == 2.0
