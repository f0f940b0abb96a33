"""Test the suite of sandboxes with broken sandboxes; each fails a test. areal_sandboxes has those of correct ones."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from areal_testing.conformance import SandboxSuite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.interfaces.sandbox import SandboxResult

sandboxes = pytest.importorskip("areal_sandboxes.bubblewrap", reason="the plugin sandboxes is not installed")
plain = pytest.importorskip("areal_sandboxes.plain")
config = pytest.importorskip("areal_sandboxes.config")
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed here")


class Changed(plain.PlainProcess):
    """A plain process whose results are changed."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        return self.change(await super().run(command, **options))

    def change(self, result: SandboxResult) -> SandboxResult:
        return result


class MixesOutputs(Changed):
    def change(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, output=result.output + result.error, error="")


class Succeeds(Changed):
    def change(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, exit_code=0)


class ExitCodeOfAShell(Changed):
    def change(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, exit_code=result.exit_code if result.exit_code >= 0 else 128)


class ReportsNoLimit(Changed):
    def change(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, limit="")


class LosesOutput(Changed):
    def change(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, output="") if result.limit == "time" else result


class NoInput(plain.PlainProcess):
    async def run(self, command: Sequence[str], *, input_text: str = "", **options: Any) -> SandboxResult:
        return await super().run(command, **options)


class Raises(plain.PlainProcess):
    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        if shutil.which(command[0]) is None:
            raise FileNotFoundError(command[0])
        return await super().run(command, **options)


class Shares(plain.PlainProcess):
    """Runs all commands in one folder."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        home = "import os, sys; os.chdir(os.environ['SHARED']); os.execvp(sys.argv[1], sys.argv[1:])"
        for name, text in (options.pop("files", None) or {}).items():
            Path(self._settings.variables["SHARED"], name).write_text(text)
        return await super().run(["python3", "-c", home, *command], **options)


class Inherits(plain.PlainProcess):
    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        message = [f"{name}={value}" for name, value in os.environ.items()]
        return await super().run(["env", *message, *command], **options)


class IgnoresCancellation(plain.PlainProcess):
    """Does not end a command whose caller is cancelled."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            await asyncio.sleep(0.01)
        return await super().run(command, **options)


class IgnoresInvalidFiles(plain.PlainProcess):
    """Leaves out files with invalid paths."""

    async def run(self, command: Sequence[str], *, files: Any = None, **options: Any) -> SandboxResult:
        kept = {name: text for name, text in (files or {}).items() if ".." not in name}
        return await super().run(command, files=kept, **options)


def without(*left_out: str, with_: Sequence[str] = ()) -> Any:
    """Return Bubblewrap without some consecutive arguments, or with additional ones."""

    class Mutant(sandboxes.Bubblewrap):  # type: ignore[misc, name-defined]
        def __init__(self, settings: Any) -> None:
            super().__init__(settings)
            text = "\0".join((*self._inner, "")).replace("\0".join((*left_out, "")), "") if left_out else None
            self._inner = [*(self._inner if text is None else text.split("\0")[:-1]), *with_]

    return Mutant


class Limits(sandboxes.Bubblewrap):  # type: ignore[misc, name-defined]
    name = ""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._limits = [word for word in self._limits if not word.startswith(f"--{self.name}=")]


class NoLimitOfMemory(Limits):
    name = "as"


class NoLimitOfProcesses(Limits):
    name = "nproc"


class ShowsEnvironment(sandboxes.Bubblewrap):  # type: ignore[misc, name-defined]
    """The first process in the sandbox inherits the environment."""

    def _start(self, request: Any, status: Any, group: Any) -> Any:
        start, own = subprocess.Popen, dict(os.environ)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *message, **options: start(*message, **{**options, "env": own}))
            return super()._start(request, status, group)


class GivesInputAgain(sandboxes.Bubblewrap):  # type: ignore[misc, name-defined]
    """The input is a file, which can be opened again."""

    def _start(self, request: Any, status: Any, group: Any) -> Any:
        start = subprocess.Popen
        with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
            os.fchmod(file.fileno(), 0o444)
            file.write(b"\n" + request.input)
            file.flush()
            file.seek(0)
            patch.setattr(
                subprocess, "Popen", lambda *message, **options: start(*message, **{**options, "stdin": file})
            )
            return super()._start(request, status, group)


def suite_tests(make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **values: Any) -> dict[str, Any]:
    """Return the tests of a suite for a sandbox by name, with their fixtures."""
    suite = type("Suite", (SandboxSuite,), {"make": lambda _: make(), "patience_s": 20.0, **values})()
    fixtures = {
        "test_files_of_this_machine_are_hidden": (tmp_path,),
        "test_the_environment_is_clean": (monkeypatch,),
    }
    names = [name for name in dir(SandboxSuite) if name.startswith("test_")]
    return {name: lambda name=name: getattr(suite, name)(*fixtures.get(name, ())) for name in names}


PLAIN = [
    (MixesOutputs, "test_a_command_gets_its_files_and_its_input", "the output is"),
    (NoInput, "test_a_command_gets_its_files_and_its_input", "the output is"),
    (Succeeds, "test_a_command_gets_its_files_and_its_input", "it ended with 3"),
    (Succeeds, "test_a_missing_program_fails_the_command", "ended with 0"),
    (ExitCodeOfAShell, "test_a_signal_is_a_negative_exit_code", "its exit code is 128"),
    (Raises, "test_a_missing_program_fails_the_command", "no-such-program"),
    (ReportsNoLimit, "test_output_is_limited", "names no limit"),
    (ReportsNoLimit, "test_time_is_limited", "slept forever"),
    (LosesOutput, "test_time_is_limited", "its output before the timeout is lost"),
    (Shares, "test_concurrent_commands_are_independent", "a command finds"),
    (Inherits, "test_the_environment_is_clean", "has found a variable"),
    (IgnoresCancellation, "test_a_cancelled_command_leaves_no_process", "run was cancelled, but"),
    (IgnoresInvalidFiles, "test_invalid_files_and_input_are_refused", "was not refused"),
]
NOTHING = [
    ("test_an_ended_command_leaves_no_process", "its processes still exist"),
    ("test_files_of_this_machine_are_hidden", "has read a file"),
    ("test_the_network_is_unreachable", "the command has connected"),
    ("test_other_processes_cannot_be_killed", "has killed a process"),
    ("test_processes_are_limited", "processes of a command ran concurrently"),
    ("test_memory_is_limited", "had 1536 MiB"),
    ("test_files_are_limited", "has written"),
    ("test_the_environment_is_clean", "has found a variable"),
]
WALLS = [
    (without("--unshare-net"), "test_the_network_is_unreachable", "the command has connected"),
    (without("--remount-ro", "/dev"), "test_files_are_limited", "has written"),
    pytest.param(
        without("--remount-ro", "/"),
        "test_files_are_limited",
        "has written",
        marks=pytest.mark.skipif(os.geteuid() == 0, reason="as root, / is read only twice"),
    ),
    (without(with_=["--tmpfs", "/tmp", "--dir", "/tmp/work"]), "test_files_are_limited", "has written"),
    (NoLimitOfMemory, "test_memory_is_limited", "had 300 MiB"),
    (NoLimitOfProcesses, "test_processes_are_limited", "processes of a command ran concurrently"),
    (GivesInputAgain, "test_input_can_be_read_once", "read a second time"),
    (ShowsEnvironment, "test_the_environment_is_clean", "has found a variable"),
]


@pytest.mark.parametrize(("make", "test", "message"), PLAIN)
def test_a_broken_sandbox_is_caught(make, test, message, tmp_path, monkeypatch):
    variables = {"SHARED": str(tmp_path)}
    settings = config.NoneSettings(variables=variables, time_s=30, max_concurrency=1)
    tests = suite_tests(lambda: make(settings), tmp_path, monkeypatch, isolates=False)
    with pytest.raises((AssertionError, FileNotFoundError), match=message):
        tests[test]()


@pytest.mark.slow
@pytest.mark.parametrize(("test", "message"), NOTHING)
def test_a_plain_process_is_no_sandbox(test, message, tmp_path, monkeypatch):
    tests = suite_tests(lambda: plain.PlainProcess(config.NoneSettings(time_s=30)), tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=message):
        tests[test]()


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize(("make", "test", "message"), WALLS)
def test_a_sandbox_with_a_hole_is_caught(make, test, message, tmp_path, monkeypatch):
    settings = config.BubblewrapSettings(memory_mib=256, processes=32, cgroup="never")
    tests = suite_tests(lambda: make(settings), tmp_path, monkeypatch, memory_mib=300, processes=33)
    with pytest.raises(AssertionError, match=message):
        tests[test]()


@needs_bubblewrap
def test_a_sandbox_that_shows_too_much_is_caught(tmp_path, monkeypatch):
    tests = suite_tests(
        lambda: sandboxes.Bubblewrap(config.BubblewrapSettings(paths=[tmp_path])), tmp_path, monkeypatch
    )
    with pytest.raises(AssertionError, match="has read a file"):
        tests["test_files_of_this_machine_are_hidden"]()
