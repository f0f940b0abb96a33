"""The suite of sandboxes passes correct ones (its plugin's tests) and catches each of these broken ones."""

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
    """A plain process whose results are told in another way."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        return self.told(await super().run(command, **options))

    def told(self, result: SandboxResult) -> SandboxResult:
        return result


class Mixes(Changed):
    def told(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, output=result.output + result.error, error="")


class Succeeds(Changed):
    def told(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, exit_code=0)


class TellsAsAShell(Changed):
    def told(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, exit_code=result.exit_code if result.exit_code >= 0 else 128)


class TellsNoLimit(Changed):
    def told(self, result: SandboxResult) -> SandboxResult:
        return dataclasses.replace(result, limit="")


class Forgets(Changed):
    def told(self, result: SandboxResult) -> SandboxResult:
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
    """One folder for all commands."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        home = "import os, sys; os.chdir(os.environ['SHARED']); os.execvp(sys.argv[1], sys.argv[1:])"
        for name, text in (options.pop("files", None) or {}).items():
            Path(self._settings.variables["SHARED"], name).write_text(text)
        return await super().run(["python3", "-c", home, *command], **options)


class Inherits(plain.PlainProcess):
    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        words = [f"{name}={value}" for name, value in os.environ.items()]
        return await super().run(["env", *words, *command], **options)


class Abandons(plain.PlainProcess):
    """What nobody waits for goes on."""

    async def run(self, command: Sequence[str], **options: Any) -> SandboxResult:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while process.poll() is None:
            await asyncio.sleep(0.01)
        return await super().run(command, **options)


class Tolerates(plain.PlainProcess):
    """Leaves out files that it cannot write."""

    async def run(self, command: Sequence[str], *, files: Any = None, **options: Any) -> SandboxResult:
        kept = {name: text for name, text in (files or {}).items() if ".." not in name}
        return await super().run(command, files=kept, **options)


def without(*left_out: str, with_: Sequence[str] = ()) -> Any:
    """Bubblewrap, but for some words that stand one behind another, or with more."""

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
    """Its own first process within has what it inherited."""

    def _start(self, request: Any, status: Any, group: Any) -> Any:
        start, own = subprocess.Popen, dict(os.environ)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subprocess, "Popen", lambda *words, **options: start(*words, **{**options, "env": own}))
            return super()._start(request, status, group)


class GivesInputAgain(sandboxes.Bubblewrap):  # type: ignore[misc, name-defined]
    """From a file, which can be opened once more."""

    def _start(self, request: Any, status: Any, group: Any) -> Any:
        start = subprocess.Popen
        with tempfile.TemporaryFile() as file, pytest.MonkeyPatch.context() as patch:
            os.fchmod(file.fileno(), 0o444)
            file.write(b"\n" + request.input)
            file.flush()
            file.seek(0)
            patch.setattr(subprocess, "Popen", lambda *words, **options: start(*words, **{**options, "stdin": file}))
            return super()._start(request, status, group)


def suite_tests(make: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, **values: Any) -> dict[str, Any]:
    """The tests of a suite for a sandbox, with what pytest would hand them."""
    suite = type("Suite", (SandboxSuite,), {"make": lambda _: make(), "patience_s": 20.0, **values})()
    given = {
        "test_files_of_this_machine_are_hidden": (tmp_path,),
        "test_the_environment_is_clean": (monkeypatch,),
    }
    names = [name for name in dir(SandboxSuite) if name.startswith("test_")]
    return {name: lambda name=name: getattr(suite, name)(*given.get(name, ())) for name in names}


PLAIN = [
    (Mixes, "test_a_command_is_given_its_files_and_its_input", "the output is"),
    (NoInput, "test_a_command_is_given_its_files_and_its_input", "the output is"),
    (Succeeds, "test_a_command_is_given_its_files_and_its_input", "it ended with 3"),
    (Succeeds, "test_a_program_that_is_not_there_is_told", "ended with 0"),
    (TellsAsAShell, "test_a_signal_is_told", "its exit code is 128"),
    (Raises, "test_a_program_that_is_not_there_is_told", "no-such-program"),
    (TellsNoLimit, "test_output_is_limited", "ended by no limit"),
    (TellsNoLimit, "test_time_is_limited", "slept for ever"),
    (Forgets, "test_time_is_limited", "what it printed before is lost"),
    (Shares, "test_commands_run_at_the_same_time_and_do_not_meet", "a command finds"),
    (Inherits, "test_the_environment_is_clean", "has found a variable"),
    (Abandons, "test_nothing_is_left_of_a_command_that_nobody_waits_for", "nobody waits for it, and"),
    (Tolerates, "test_what_cannot_be_given_is_refused", "was not refused"),
]
NOTHING = [
    ("test_nothing_is_left_of_a_command_that_has_ended", "its processes are there"),
    ("test_files_of_this_machine_are_hidden", "has read a file"),
    ("test_nothing_can_be_reached_by_network", "the command has connected"),
    ("test_other_processes_cannot_be_killed", "has killed a process"),
    ("test_processes_are_limited", "processes of a command were there"),
    ("test_memory_is_limited", "had 1536 MiB"),
    ("test_files_are_limited", "has written"),
    ("test_the_environment_is_clean", "has found a variable"),
]
WALLS = [
    (without("--unshare-net"), "test_nothing_can_be_reached_by_network", "the command has connected"),
    (without("--remount-ro", "/dev"), "test_files_are_limited", "has written"),
    pytest.param(
        without("--remount-ro", "/"),
        "test_files_are_limited",
        "has written",
        marks=pytest.mark.skipif(os.geteuid() == 0, reason="as root, / is read only twice"),
    ),
    (without(with_=["--tmpfs", "/tmp", "--dir", "/tmp/work"]), "test_files_are_limited", "has written"),
    (NoLimitOfMemory, "test_memory_is_limited", "had 300 MiB"),
    (NoLimitOfProcesses, "test_processes_are_limited", "processes of a command were there"),
    (GivesInputAgain, "test_input_can_be_read_once", "read a second time"),
    (ShowsEnvironment, "test_the_environment_is_clean", "has found a variable"),
]


@pytest.mark.parametrize(("make", "test", "words"), PLAIN)
def test_a_broken_sandbox_is_caught(make, test, words, tmp_path, monkeypatch):
    variables = {"SHARED": str(tmp_path)}
    settings = config.NoneSettings(variables=variables, time_s=30, max_concurrency=1)
    tests = suite_tests(lambda: make(settings), tmp_path, monkeypatch, isolates=False)
    with pytest.raises((AssertionError, FileNotFoundError), match=words):
        tests[test]()


@pytest.mark.slow
@pytest.mark.parametrize(("test", "words"), NOTHING)
def test_a_plain_process_is_no_sandbox(test, words, tmp_path, monkeypatch):
    tests = suite_tests(lambda: plain.PlainProcess(config.NoneSettings(time_s=30)), tmp_path, monkeypatch)
    with pytest.raises(AssertionError, match=words):
        tests[test]()


@needs_bubblewrap
@pytest.mark.slow
@pytest.mark.parametrize(("make", "test", "words"), WALLS)
def test_a_sandbox_with_a_hole_is_caught(make, test, words, tmp_path, monkeypatch):
    settings = config.BubblewrapSettings(memory_mib=256, processes=32, cgroup="never")
    tests = suite_tests(lambda: make(settings), tmp_path, monkeypatch, memory_mib=300, processes=33)
    with pytest.raises(AssertionError, match=words):
        tests[test]()


@needs_bubblewrap
def test_a_sandbox_that_shows_too_much_is_caught(tmp_path, monkeypatch):
    tests = suite_tests(
        lambda: sandboxes.Bubblewrap(config.BubblewrapSettings(paths=[tmp_path])), tmp_path, monkeypatch
    )
    with pytest.raises(AssertionError, match="has read a file"):
        tests["test_files_of_this_machine_are_hidden"]()
