"""What the program behind `areal serve --join` says to a run, whose attempts come and go."""

from __future__ import annotations

import tempfile

import pytest

from areal_core.config import resolve
from areal_core.driver import serving as joining
from areal_core.driver.serve import serve
from areal_core.driver.serving import Joining
from areal_core.errors import RunError, UsageError
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding
from areal_core.runs import RunFolder
from areal_core.runtime import attempts
from areal_core.runtime.messages import Forwarded
from areal_core.runtime.rpc import Failed, FrameDecoder, encode_frame


class Run:
    """A run of which each attempt answers in its own way; asked through the real frames."""

    def __init__(self, folder):
        self.folder = RunFolder(folder)
        self.asked = []
        self.answers = {}

    def begin_attempt(self, number, *answers):
        self.folder.attempt(number).path.mkdir(parents=True)
        self.answers[number] = list(answers)

    def ask_driver(self, attempt, question, timeout_s):
        assert question.role == "controller"
        message = FrameDecoder().feed(question.request)[0].message
        self.asked.append((attempt.number, message))
        answers = self.answers[attempt.number]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return Forwarded(bytes(encode_frame(answer[0]))) if isinstance(answer, tuple) else answer


@pytest.fixture
def run(tmp_path, monkeypatch):
    made = Run(tmp_path)
    monkeypatch.setattr(attempts, "ask_driver", made.ask_driver)
    monkeypatch.setattr(joining, "INTERVAL_S", 0.001)
    return made


def of(run):
    told = []
    return Joining(run.folder, "extra", "http://127.0.0.1:5", told.append), told


def standing(state, reason=""):
    return (ServerStanding(state, reason),)


def test_a_server_joins_and_what_becomes_of_it_is_told_once(run):
    states = [standing("starting"), standing("ready"), standing("updating"), standing("lost", "extra lost: no answer")]
    run.begin_attempt(1, *states, standing("ready"))
    server, told = of(run)
    for _ in range(6):
        server.renew()
    assert [message for _, message in run.asked] == [ServerJoins("extra", "http://127.0.0.1:5")] * 6
    in_use = f"in use by the run in {run.folder.path} as extra"
    assert told == ["not in use yet: starting", in_use, "not in use yet: extra lost: no answer", in_use]


def test_a_run_that_ends_is_waited_for_and_joined_again_when_it_is_resumed(run):
    server, told = of(run)
    server.renew()
    assert told[-1].startswith(f"no run is in progress in {run.folder.path}; the server waits for it (areal run --res")
    run.begin_attempt(1, standing("ready"))
    server.renew()
    run.answers[1] = [None]  # it was killed
    server.renew()
    assert told[-1].startswith("its driver does not answer in ")
    run.begin_attempt(2, Failed("the run has no controller now"), standing("ready"))
    server.renew()
    assert told[-1].startswith("the run has no controller now in ")
    server.renew()
    assert told[-1].startswith("in use by the run in ")
    run.folder.attempt(2).released.touch()
    server.renew()
    assert told[-1].startswith("no run is in progress in ")
    assert [number for number, _ in run.asked] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((Failed("the run has a server extra at http://127.0.0.1:4 already"),), "has a server extra at"),
        (standing("refused", "extra refused: serves another model"), "cannot use this server.*another model"),
    ],
)
def test_what_the_run_will_never_use_is_an_error(run, answer, words):
    run.begin_attempt(1, answer)
    server, _ = of(run)
    with pytest.raises(RunError, match=words):
        server.renew()


@pytest.mark.parametrize("last", [standing(""), None, Failed("the run has no controller now")])
def test_leaving_waits_until_the_run_has_let_go_or_is_gone(run, last):
    run.begin_attempt(1, standing("leaving"), standing("leaving"), last)
    server, _ = of(run)
    server.leave(60.0)
    assert [message for _, message in run.asked] == [ServerLeaves("extra", "http://127.0.0.1:5")] * 3


@pytest.mark.parametrize(
    ("host", "message"), [("0.0.0.0", "has no key"), ("127.0.0.1", "the model is made when a run starts")]
)
def test_a_server_without_a_run_that_is_refused_leaves_no_folder_behind(tmp_path, monkeypatch, host, message):
    for plugin in ("areal_grpo", "areal_sglang"):
        pytest.importorskip(plugin, reason="the first-party plugins are not installed")
    resolved = resolve("grpo/addition", overrides=["inference_engine=sglang"], environment={})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UsageError, match=message):
        serve(resolved, None, name=None, host=host, port=0, gpus=None)
    assert list(tmp_path.iterdir()) == []
