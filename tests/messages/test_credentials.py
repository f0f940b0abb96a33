"""Who is let in."""

import pytest

from areal_core.messages.credentials import Credentials, Hello


@pytest.mark.parametrize(
    ("hello", "told"),
    [
        (Hello("token", 2, "trainer-0"), ""),
        (Hello("token", 1, "trainer-0"), "epoch 1 of the run is over: it is in epoch 2"),
        (Hello("token", 1, "warden"), ""),
        (Hello("token", 3, "warden"), "epoch 3 of the run"),
        (Hello("other", 2, "warden"), "the token is another run's"),
    ],
)
def test_whoever_comes_with_an_older_epoch_is_refused_but_for_a_new_node(hello, told):
    refusal = Credentials("token", 2).refusal(hello)
    assert refusal.startswith(told)
    assert bool(refusal) is bool(told)
