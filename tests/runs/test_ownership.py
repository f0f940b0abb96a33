"""A run has one owner; whether a former one lives is asked of it, never read from a file."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_core.errors import UsageError
from areal_core.launchers.identity import identify
from areal_core.messages import Credentials
from areal_core.runs import ownership
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import Ownership, ask_owner, claim, exit_code_of, next_epoch, release

pytestmark = pytest.mark.slow

OWNER = """
import asyncio, sys
from pathlib import Path
from areal_core.launchers.local import LocalLauncher
from areal_core.launchers.settings import LocalSettings
from areal_core.messages import Credentials
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import claim
from areal_core.runs.supervisor import Supervisor

async def main():
    credentials = Credentials.create(1)
    supervisor = Supervisor(LocalLauncher(LocalSettings()), credentials, lambda name: Path(name), print, print)
    claim(RunFolder(Path(sys.argv[1])).epoch(1), await supervisor.listen(), credentials)
    print("owned", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def owner(tmp_path: Path):
    """Another process that owns the run."""
    process = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def test_an_owner_that_answers_is_named(tmp_path: Path, owner: subprocess.Popen[str]) -> None:
    with pytest.raises(UsageError, match=f"another process is running in .*: process {owner.pid} on"):
        next_epoch(RunFolder(tmp_path), print)


def test_an_owner_that_was_killed_on_this_host_is_succeeded_at_once(
    tmp_path: Path, owner: subprocess.Popen[str]
) -> None:
    owner.kill()
    owner.wait()
    said: list[str] = []
    assert next_epoch(RunFolder(tmp_path), said.append).number == 2
    assert said == []


def test_an_owner_elsewhere_that_is_silent_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a countdown, for as long as its wardens may go on without it."""
    run, slept = RunFolder(tmp_path), []
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    stranger = Ownership("tcp:127.0.0.1:9", "far-away", "elsewhere/pid:[1] 77 123")
    run.epoch(1).owner.write_text(json.dumps({name: getattr(stranger, name) for name in stranger.__slots__}))
    clock = [0.0]
    monkeypatch.setattr(ownership.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(ownership.time, "sleep", sleep)
    monkeypatch.setattr(ownership, "ask_owner", lambda *_: None)
    said: list[str] = []
    assert next_epoch(run, said.append).number == 2
    assert sum(slept) >= ownership.LEASE_S
    assert "77 on far-away" in said[0]
    assert "in 75 s" in said[0]


def test_one_that_ended_in_order_is_not_asked(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    release(run.epoch(1))
    assert next_epoch(run, pytest.fail).number == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("owner.json", '{"addr'),
        ("owner.json", "7"),
        ("owner.json", None),
        ("owner.json", '{"address": "tcp:x", "host": "h", "process": "e4 1"}'),
        ("token", None),
    ],
)
def test_an_owner_whose_files_are_damaged_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None
) -> None:
    run = RunFolder(tmp_path)
    claim(run.epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    damaged = run.epoch(1).path / name
    damaged.unlink()
    if text is not None:
        damaged.write_text(text)
    monkeypatch.setattr(ownership, "LEASE_S", 0.1)
    monkeypatch.setattr(ownership, "MARGIN_S", 0.1)
    said: list[str] = []
    assert next_epoch(run, said.append).number == 2
    assert "a host that its damaged files do not name" in said[0]


def test_a_folder_that_cannot_be_written_is_a_wrong_request(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        claim(RunFolder(tmp_path / "file/run").epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))


def test_a_claim_that_a_full_disk_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "rename", rename)
        with pytest.raises(UsageError, match="cannot be written: No space left on device"):
            claim(RunFolder(tmp_path / "run").epoch(1), "tcp:127.0.0.1:9", Credentials.create(1))
    assert list(tmp_path.iterdir()) == []


def test_of_many_that_claim_an_epoch_one_gets_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def attempt(number: int) -> bool:
        code = f"""
from pathlib import Path
from areal_core.messages import Credentials
from areal_core.runs.folder import RunFolder
from areal_core.runs.ownership import claim
claim(RunFolder(Path({str(tmp_path)!r})).epoch(1), "tcp:here:{number}", Credentials.create(1))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "another process has just begun" in done.stderr
        return done.returncode == 0

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert [path.name for path in (tmp_path / "epochs").iterdir()] == ["000001"], "nothing half made is left"
    assert json.loads(run.epoch(1).owner.read_text())["address"].startswith("tcp:here:")


def test_the_token_is_for_its_user_alone(tmp_path: Path) -> None:
    epoch = RunFolder(tmp_path).epoch(1)
    claim(epoch, "tcp:127.0.0.1:9", Credentials("secret", 1))
    assert epoch.token.stat().st_mode & 0o777 == 0o600
    assert epoch.token.read_text() == "secret"
    owner = json.loads(epoch.owner.read_text())
    assert owner["process"] == identify(os.getpid())


def test_nobody_answers_for_an_epoch_without_an_owner(tmp_path: Path) -> None:
    assert ask_owner(RunFolder(tmp_path).epoch(1), Ownership("", "", ""), 0.1) is None


@pytest.mark.parametrize(("text", "code"), [("done 4", 0), ("interrupted 4 143", 143), ("failed 4 1", 1),
                                            ("failed", 1), ("recovering 4 1", None), ("", None)])  # fmt: skip
def test_the_exit_code_is_what_the_owner_has_left(tmp_path: Path, text: str, code: int | None) -> None:
    epoch = RunFolder(tmp_path / "run").epoch(1)
    assert exit_code_of(epoch) is None
    claim(epoch, "tcp:127.0.0.1:1", Credentials.create(1))
    assert exit_code_of(epoch) is None
    release(epoch, text)
    assert exit_code_of(epoch) == code
