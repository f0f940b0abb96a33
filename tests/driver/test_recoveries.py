"""How often a run goes back by itself before it ends."""

import json

import pytest

from areal_core.cli import main
from areal_core.driver.attempts import claim, release
from areal_core.driver.recoveries import Recoveries, resume_hint
from areal_core.errors import LostError, RunError
from areal_core.messages import Credentials
from areal_core.runs.folder import RunFolder
from areal_core.training.resume_hints import STATE_FILE

LOST = LostError("trainer-0 was killed by SIGKILL", hints=["its log: x"])


def test_each_loss_is_told_with_its_count():
    said = []
    found = Recoveries(2, said.append)
    found.note(LOST, "step-000001")
    found.note(LOST, "step-000002")
    assert [line.splitlines()[1] for line in said] == [
        "going back to the last checkpoint (1 of at most 2 times without a new one)",
        "going back to the last checkpoint (1 of at most 2 times without a new one)",
    ]


def test_without_a_checkpoint_it_is_told_that_the_run_begins_anew():
    said = []
    for committed in ("", "step-00000000"):
        Recoveries(2, said.append).note(LOST, committed)
    assert [line.splitlines()[1] for line in said] == [
        "no checkpoint yet: the run starts over (1 of at most 2 times without a new one)"
    ] * 2


def checkpoint(run, step):
    folder = run.attempt(1).checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345678")
    (folder / STATE_FILE).write_text(json.dumps({"files": {"weights": 8}}))
    return folder


def test_a_run_that_has_ended_says_the_same_wherever_it_is_asked_how_it_goes_on(tmp_path, capsys):
    """`areal status` sent users into a resume that fails at once."""
    run = RunFolder(tmp_path / "run")
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    release(run.attempt(1), "failed 4 1")
    resume = f"continue with: areal run --resume {run.path}"

    def told():
        assert main(["status", str(run.path)]) == 1
        words = resume_hint(run, has_failed=True)
        assert capsys.readouterr().out.rstrip().endswith(f"; {words}")
        return words

    assert told() == f"nothing was saved: fix the error and run again (the run folder can be deleted), or {resume}"
    checkpoint(run, 0)
    assert told().startswith("nothing was saved: ")
    older, newest = checkpoint(run, 2), checkpoint(run, 4)
    assert told() == resume
    (newest / "weights").write_bytes(b"123")
    damaged = told()
    assert f"the checkpoint is damaged: {newest / 'weights'} had 8 bytes and has 3" in damaged
    assert f"an older one is kept: {older}" in damaged
    assert f"mv {newest} {run.path / 'damaged-step-00000004'} && areal run --resume {run.path}" in damaged
    release(run.attempt(1), "interrupted 4 143")
    assert told() == damaged
    assert resume_hint(RunFolder(tmp_path / "an odd $(name)"), has_failed=False).endswith("an odd $(name)'"), (
        "for a shell"
    )


def test_going_back_to_the_same_checkpoint_again_and_again_ends_the_run():
    found = Recoveries(3, lambda _: None)
    found.note(LOST, "step-000002")
    for _ in range(3):
        found.note(LOST, "step-000004")
    with pytest.raises(RunError, match="3 times without reaching a new checkpoint"):
        found.note(LOST, "step-000004")


def test_none_are_allowed_where_the_limit_is_0():
    with pytest.raises(RunError, match="was killed by SIGKILL") as found:
        Recoveries(0, lambda _: None).note(LOST, "")
    assert not isinstance(found.value, LostError), "the run does not go back"
