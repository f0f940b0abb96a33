import threading

import pytest

from areal_core.errors import ConfigError
from areal_core.rollout.scoring import RewardSum, RewardTerm

pytest.importorskip("math_verify")

from areal_rewards.mathematics import _parse_answer, math_verify


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


def test_an_answer_without_mathematics_is_an_error_and_no_silent_zero():
    with pytest.raises(ValueError, match="the row's answer, '', is nothing that math-verify understands"):
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
    with pytest.raises(ConfigError, match=r"math_verify, which is not installed: pip install 'areal-rewards\[math\]'"):
        math_verify("1", "1")


def test_the_runtime_calls_it_with_the_rows_answer():
    rewards = RewardSum([RewardTerm("right", math_verify, 2.0)])
    assert rewards({"completion": "It is 3", "row": {"answer": "3"}, "prompt": ""}).value == 2.0
