"""A broadcast that the servers refuse, in a group of the trainer alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal_core.engines import TransferFailedError
from areal_core.errors import RunError
from areal_core.interfaces.inference import BroadcastGroup
from areal_core.messages.rollouts import FormGroup
from areal_core.training.broadcast import Broadcast
from tests.training.engines import engine_that_gathers

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the trainer run on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


class Rollouts:
    """A client that answers each request once, as the real one does. A second wait for the answer would never end."""

    def __init__(self, *, fails: bool, max_concurrency: bool) -> None:
        self._fails = fails
        self._at_once = max_concurrency
        self.sender: Any = None
        self.waits: list[str] = []

    def call(self, message: Any) -> Any:
        assert isinstance(message, FormGroup)
        return SimpleNamespace(group=BroadcastGroup("alone", 1, (), is_new=True))

    def sync_weights(self, version: int, trained: int, tensors: Any) -> int:
        return 1

    def has_failed(self, number: int) -> bool:
        return self._at_once and not self.waits

    def wait(self, number: int) -> Any:
        self.waits.append("with its group" if self.sender._group is not None else "after it gave up")
        if self._fails:
            raise RunError("no server took over the weights of version 1")
        return SimpleNamespace(needs_folder=False)


def broadcast(rollouts: Rollouts) -> bool:
    engine = engine_that_gathers(lambda: iter([("weight", torch.ones(2, 2))]))
    made: Any = Broadcast
    rollouts.sender = made(engine, rollouts)
    return bool(rollouts.sender.send(1, 1))


def test_weights_that_are_taken_over():
    rollouts = Rollouts(fails=False, max_concurrency=False)
    assert not broadcast(rollouts)
    assert rollouts.waits == ["with its group"]


def test_a_failure_behind_the_last_tensor_is_logged(capsys: pytest.CaptureFixture[str]):
    """Every tensor has arrived, and then the servers report that they did not load them."""
    rollouts = Rollouts(fails=True, max_concurrency=False)
    with pytest.raises(TransferFailedError):
        broadcast(rollouts)
    assert rollouts.waits == ["with its group", "after it gave up"]
    reason = "no server took over the weights of version 1; the weights go through a folder"
    assert capsys.readouterr().err == f"the broadcast of version 1 failed: {reason}\n"


def test_the_answer_to_a_broadcast_that_broke_off_is_taken(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the next request would get it."""

    def breaks_off(self: Broadcast, *_: Any) -> None:
        raise TransferFailedError

    monkeypatch.setattr(Broadcast, "_broadcast", breaks_off)
    rollouts = Rollouts(fails=True, max_concurrency=True)
    with pytest.raises(TransferFailedError):
        broadcast(rollouts)
    assert rollouts.waits == ["after it gave up"]


class FailedWork:
    """A transfer as a backend reports a lost receiver: completed, with the error raised by `wait`."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


class QuietRollouts:
    """A controller that reports no failure of its own."""

    def sync_weights(self, version: int, trained: int, tensors: Any) -> int:
        return 1

    def has_failed(self, number: int) -> bool:
        return False

    def wait(self, number: int) -> Any:
        return SimpleNamespace(needs_folder=False)


def test_a_transfer_that_completes_with_an_error_fails_the_broadcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the error, the trainer would report weights as synced that no server received."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def form_failing_group(self: Broadcast, rollouts: Any) -> bool:
        self._group = SimpleNamespace(broadcast=lambda tensors, options: FailedWork())
        return True

    monkeypatch.setattr(Broadcast, "_join_group", form_failing_group)
    engine = engine_that_gathers(lambda: iter([("weight", torch.ones(2, 2))]))
    make_broadcast: Any = Broadcast
    with pytest.raises(TransferFailedError):
        make_broadcast(engine, QuietRollouts()).send(1, 1)
