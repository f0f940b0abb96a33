"""Who is let in."""

import pytest

from areal_core.messages.credentials import Credentials, Hello


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (Hello("token", 2, "trainer-0"), ""),
        (Hello("token", 1, "trainer-0"), "attempt 1 of the run is over: it is in attempt 2"),
        (Hello("token", 1, "guard"), ""),
        (Hello("token", 3, "guard"), "attempt 3 of the run"),
        (Hello("other", 2, "guard"), "the token is another run's"),
    ],
)
def test_whoever_comes_with_an_older_attempt_is_refused_but_for_a_guard(hello, told):
    refusal = Credentials("token", 2).refusal(hello)
    assert refusal.startswith(told)
    assert bool(refusal) is bool(told)
