"""How a run that has ended continues, in words."""

import json

from areal_core.cli import main
from areal_core.driver.resume_hint import resume_hint
from areal_core.runtime.attempts import claim, release
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.rpc import Credentials
from areal_core.training.resume_hints import STATE_FILE


def checkpoint(run, step):
    folder = run.attempt(1).checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True)
    (folder / "weights").write_bytes(b"12345678")
    (folder / STATE_FILE).write_text(json.dumps({"files": {"weights": 8}}))
    return folder


def test_status_and_errors_give_the_same_hint_how_to_continue(tmp_path, capsys):
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
    assert f"an older checkpoint is kept: {older}" in damaged
    assert f"mv {newest} {run.path / 'damaged-step-00000004'} && areal run --resume {run.path}" in damaged
    release(run.attempt(1), "interrupted 4 143")
    assert told() == damaged
    assert resume_hint(RunFolder(tmp_path / "an odd $(name)"), has_failed=False).endswith("an odd $(name)'"), (
        "for a shell"
    )
