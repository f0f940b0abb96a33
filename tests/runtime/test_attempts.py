"""A run has one driver. Whether a former one lives is asked of it, never read from a file."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_core import waiting
from areal_core.errors import UsageError
from areal_core.runtime import attempts
from areal_core.runtime.attempts import ask_driver, claim, next_attempt, release
from areal_core.runtime.folder import DriverNote, RunFolder
from areal_core.runtime.process_tree import identify
from areal_core.runtime.rpc import Credentials

pytestmark = pytest.mark.slow

DRIVER = """
import asyncio, sys
from pathlib import Path
from areal_core.runtime.attempts import claim
from areal_core.runtime.supervisor import Supervisor
from areal_core.runtime.local import LocalLauncher
from areal_core.runtime.settings import LocalSettings
from areal_core.runtime.folder import RunFolder

async def main():
    run = RunFolder(Path(sys.argv[1]))
    driver = Supervisor(LocalLauncher(LocalSettings()), run, print, print)
    address = await driver.listen()
    driver.admit(run.attempt(1))
    claim(run.attempt(1), address, driver.credentials)
    print("owned", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@pytest.fixture
def driver(tmp_path: Path):
    """Another process that owns the run."""
    process = subprocess.Popen([sys.executable, "-c", DRIVER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "owned\n"
    yield process
    process.kill()
    process.wait()


def test_a_run_folder_is_for_its_user_only(tmp_path: Path) -> None:
    run, former = RunFolder(tmp_path / "run"), os.umask(0)
    try:
        claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    finally:
        os.umask(former)
    assert run.path.stat().st_mode & 0o777 == 0o700


def test_a_driver_that_answers_is_named(tmp_path: Path, driver: subprocess.Popen[str]) -> None:
    with pytest.raises(UsageError, match=f"another process is running in .*: process {driver.pid} on"):
        next_attempt(RunFolder(tmp_path), print)


def test_a_driver_that_was_killed_on_this_host_is_succeeded_immediately(
    tmp_path: Path, driver: subprocess.Popen[str]
) -> None:
    driver.kill()
    driver.wait()
    said: list[str] = []
    assert next_attempt(RunFolder(tmp_path), said.append).number == 2
    assert said == []


GUARD_OF_FORKS = """
import sys
from pathlib import Path
from areal_core.runtime.guard import make_scratch
print(make_scratch(Path(sys.argv[1]).read_text()), flush=True)
sys.stdin.read()
"""


def test_the_guard_of_forked_members_is_waited_for(tmp_path: Path) -> None:
    """Forks are not executed with the token of the run, so their environment does not show it."""
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    note = json.loads(run.attempt(1).driver.read_text())
    with subprocess.Popen(["true"]) as ended:
        note["process"] = identify(ended.pid)
    run.attempt(1).driver.write_text(json.dumps(note))
    command = [sys.executable, "-c", GUARD_OF_FORKS, str(run.attempt(1).token)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as guard,
        ThreadPoolExecutor(1) as pool,
    ):
        assert guard.stdout is not None
        scratch = Path(guard.stdout.readline().strip())
        successor = pool.submit(next_attempt, run, pytest.fail)
        with pytest.raises(TimeoutError):
            successor.result(0.5)
        guard.kill()
        assert successor.result(60).number == 2
    shutil.rmtree(scratch)


def test_a_driver_elsewhere_that_is_silent_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A countdown is logged until its processes must have ended."""
    run, slept = RunFolder(tmp_path), []
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    stranger = DriverNote("tcp:127.0.0.1:9", "far-away", "elsewhere/pid:[1] 77 123")
    run.attempt(1).driver.write_text(json.dumps({name: getattr(stranger, name) for name in stranger.__slots__}))
    clock = [0.0]
    monkeypatch.setattr(waiting.time, "monotonic", lambda: clock[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(waiting.time, "sleep", sleep)
    monkeypatch.setattr(attempts, "ask_driver", lambda *_: None)
    said: list[str] = []
    assert next_attempt(run, said.append).number == 2
    assert sum(slept) >= attempts.TAKEOVER_S
    assert "77 on far-away" in said[0]
    assert "in 60 s" in said[0]


def test_a_driver_that_ended_in_order_is_not_asked(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    claim(run.attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    release(run.attempt(1))
    assert next_attempt(run, pytest.fail).number == 2


def test_a_folder_that_cannot_be_written_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written: Not a directory"):
        claim(RunFolder(tmp_path / "file/run").attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))


def test_a_claim_that_a_full_disk_refuses_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(path: Path, target: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(Path, "rename", rename)
        with pytest.raises(UsageError, match="cannot be written: No space left on device"):
            claim(RunFolder(tmp_path / "run").attempt(1), "tcp:127.0.0.1:9", Credentials.create(1))
    assert list(tmp_path.iterdir()) == []


def test_one_of_many_programs_that_claim_an_attempt_gets_it(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)

    def attempt(number: int) -> bool:
        code = f"""
from pathlib import Path
from areal_core.runtime.rpc import Credentials
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.attempts import claim
claim(RunFolder(Path({str(tmp_path)!r})).attempt(1), "tcp:here:{number}", Credentials.create(1))
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "another process has just begun" in done.stderr
        return done.returncode == 0

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(attempt, range(8))) == 1
    assert [path.name for path in (tmp_path / "attempts").iterdir()] == ["1"], "nothing half made is left"
    assert json.loads(run.attempt(1).driver.read_text())["address"].startswith("tcp:here:")


def test_the_token_is_for_its_user_only(tmp_path: Path) -> None:
    attempt = RunFolder(tmp_path).attempt(1)
    claim(attempt, "tcp:127.0.0.1:9", Credentials("secret", 1))
    assert attempt.token.stat().st_mode & 0o777 == 0o600
    assert attempt.token.read_text() == "secret"
    driver = json.loads(attempt.driver.read_text())
    assert driver["process"] == identify(os.getpid())


def test_an_attempt_without_a_driver_does_not_answer(tmp_path: Path) -> None:
    assert ask_driver(RunFolder(tmp_path).attempt(1), DriverNote("", "", ""), 0.1) is None


@pytest.mark.parametrize(("text", "code"), [("done 4", 0), ("interrupted 4 143", 143), ("failed 4 1", 1),
                                            ("failed", 1), ("recovering 4 1", None), ("", None)])  # fmt: skip
def test_the_exit_code_is_read_from_the_outcome(tmp_path: Path, text: str, code: int | None) -> None:
    attempt = RunFolder(tmp_path / "run").attempt(1)
    assert attempt.exit_code is None
    claim(attempt, "tcp:127.0.0.1:1", Credentials.create(1))
    assert attempt.exit_code is None
    release(attempt, text)
    assert attempt.exit_code == code
