"""Play tasks of Harbor in a sandbox."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_agents.environments.conversation import (
    Sessions,
    call_tools,
    converse,
    cut_result,
    mark_cut,
    opening_messages,
)
from areal_agents.episodes import make_episode
from areal_agents.outcomes import Outcome
from areal_agents.threads import run_in_thread
from areal_core.chat import template_arguments
from areal_core.data import FinishReason
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_agents.conversations import Turn
    from areal_agents.harbor.config import HarborSettings
    from areal_agents.session import Session
    from areal_core.chat import Message
    from areal_core.data import Episode
    from areal_core.sdk import FolderSandbox, SandboxResult, WorkflowContext

BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command with bash and return its output. Files stay; variables and processes do not.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
"""Files that may hold the tests' reward. Only one of them may exist."""
SHOWN_CHARACTERS = 1000
"""Characters of the tests' output that are part of an error message."""
MEBIBYTE = 1 << 20


class HarborTestsError(Exception):
    """The tests of a task gave no reward. The episode fails; its reward is not 0."""


class HarborWorkflow:
    """The policy works in a shell of a sandbox. The task's tests then run in the same folder, and give the reward.

    Args:
        settings: the sandbox, and limits of a conversation.

    Raises:
        ConfigError: the sandbox keeps no folders.
    """

    def __init__(self, settings: HarborSettings) -> None:
        self._settings = settings
        self._sandbox: FolderSandbox = settings.sandbox.build()
        if not hasattr(self._sandbox, "run_in"):
            raise ConfigError(
                f"workflow.sandbox: {settings.sandbox.target} keeps no folders from one command to the next",
                hints=["use sandboxes/bubblewrap"],
            )
        self._sessions = Sessions(settings, settings.max_steps)

    def check_row(self, row: Mapping[str, Any], tokenizer: Any = None) -> str:
        """Return why an episode cannot be played for a row; empty if it can."""
        del tokenizer
        if missing := [key for key in ("folder", "instruction", "workdir", "environment", "tests") if key not in row]:
            return f"the row has no {', '.join(missing)}, only {', '.join(row)}: use the data set agents/harbor"
        return ""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """Play one episode; see `RolloutWorkflow.run_episode`.

        Raises:
            HarborTestsError: the tests gave no reward.
            ValueError: the policy's commands wrote more than `disk_mib`.
        """
        settings, began_at = self._settings, time.monotonic()
        session = self._sessions.open(context)
        folder = Path(tempfile.mkdtemp(prefix="areal-harbor-"))
        try:
            shell = _Shell(settings, self._sandbox, row, folder)
            await run_in_thread(shell.prepare)
            await self._solve(row, session, shell)
            rewards = await shell.test()
        finally:
            await run_in_thread(lambda: _remove(folder))
        if settings.reward_key not in rewards:
            names = ", ".join(rewards)
            raise HarborTestsError(f"the tests gave no `{settings.reward_key}`, only {names}: set reward_key")
        reward = rewards.pop(settings.reward_key)
        return await make_episode(session, Outcome(reward, rewards), context, settings, time.monotonic() - began_at)

    async def _solve(self, row: Mapping[str, Any], session: Session, shell: _Shell) -> None:
        settings = self._settings

        async def call(request: Mapping[str, Any]) -> str:
            name, arguments = request["function"]["name"], request["function"]["arguments"]
            command = arguments.get("command") if isinstance(arguments, dict) else None
            if name != "bash" or not isinstance(command, str):
                session.counts["tool_errors"] += 1
                return "error: there is one tool, bash, with the argument command"
            return await shell.run(command)

        async def respond(turn: Turn) -> Sequence[Message]:
            if turn.generation.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT) or not turn.answer.acts:
                return []
            messages = await call_tools(turn, call)
            if len(session.conversations.turns) == settings.max_steps:
                mark_cut(session)
                return []
            return messages

        opening = opening_messages(settings.system, row["instruction"])
        await converse(session, opening, [BASH], template_arguments(row, settings.chat_template_kwargs or {}), respond)


class _Shell:
    """The sandbox of one episode.

    Args:
        settings: the workflow's.
        sandbox: runs commands.
        row: the task.
        folder: empty folder for the files of the episode.
    """

    def __init__(self, settings: HarborSettings, sandbox: FolderSandbox, row: Mapping[str, Any], folder: Path) -> None:
        self._settings = settings
        self._sandbox = sandbox
        self._task = Path(row["folder"])
        self._workdir: str = row["workdir"]
        self._environment: Mapping[str, Any] = row["environment"]
        self._tests: Mapping[str, Any] = row["tests"]
        self._work, self._logs, self._verifier = (folder / name for name in ("work", "logs", "tests"))
        self._running = asyncio.Lock()

    def prepare(self) -> None:
        """Make the folders of the policy, with the files of the task's environment."""
        self._logs.mkdir()
        given = self._task / "environment"
        if given.is_dir():
            shutil.copytree(given, self._work, symlinks=True)  # a link must not lead out of the task
        else:
            self._work.mkdir()

    async def run(self, command: str) -> str:
        """Return the output of one of the policy's commands.

        Raises:
            ValueError: the files of the episode have more than `disk_mib`.
        """
        folders = {self._workdir: self._work, "/logs": self._logs}
        limit = self._settings.command_timeout_s
        async with self._running:  # the calls of an answer run in their order
            ended = await self._run(folders, ["bash", "-c", command], self._environment, limit)
        text = cut_result((ended.output + ended.error).rstrip(), self._settings.longest_result)
        if ended.limit:
            text += f"\n(the command was ended by its limit of {ended.limit})"
        elif ended.exit_code:
            text += f"\n(exit code {ended.exit_code})"
        return text or "(no output)"

    async def test(self) -> dict[str, float]:
        """Run the tests with logs of their own, and return their rewards.

        Raises:
            HarborTestsError: they gave no reward, or did not end in time.
        """
        settings = self._settings
        limit = min(settings.tests_timeout_s, self._tests["timeout_s"] or math.inf)
        logs = self._logs.with_name("verifier-logs")

        def prepare() -> None:
            shutil.copytree(self._task / "tests", self._verifier, symlinks=True)
            (logs / "verifier").mkdir(parents=True)

        await run_in_thread(prepare)
        folders = {self._workdir: self._work, "/logs": logs, "/tests": self._verifier}
        variables = {**self._environment, **self._tests["environment"]}
        ended = await self._run(folders, ["bash", "/tests/test.sh"], variables, limit)
        if ended.limit:
            raise HarborTestsError(f"the tests of {self._task.name} were ended by their limit of {ended.limit}")
        # The tests may run the policy's code, and a link would lead out of the sandbox: it must not be read here.
        read = {path: await self._sandbox.run_in(folders, ["cat", path]) for path in REWARDS}
        if found := {path: result.output for path, result in read.items() if result.exit_code == 0}:
            if len(found) > 1:
                raise HarborTestsError(f"the tests of {self._task.name} wrote {' and '.join(found)}: which one counts?")
            ((path, text),) = found.items()
            return _rewards(text, path)
        said = (ended.output + ended.error).strip()[-SHOWN_CHARACTERS:]
        raise HarborTestsError(f"the tests of {self._task.name} wrote no reward (exit code {ended.exit_code}): {said}")

    async def _run(
        self, folders: Mapping[str, Path], command: Sequence[str], variables: Mapping[str, Any], timeout_s: float
    ) -> SandboxResult:
        words = ["env", "-C", self._workdir, *(f"{name}={value}" for name, value in variables.items()), *command]
        ended = await self._sandbox.run_in(folders, words, timeout_s=timeout_s)
        size = await run_in_thread(lambda: sum(map(_size, folders.values())))
        if size > self._settings.disk_mib * MEBIBYTE:
            raise ValueError(f"the files of the episode have {size / MEBIBYTE:.0f} MiB, more than workflow.disk_mib")
        return ended


def _size(folder: Path) -> int:
    """Return the bytes that the files of a folder take, without following links.

    Raises:
        OSError: a folder cannot be read, as one that the policy has closed to others.
    """

    def refuse(error: OSError) -> None:
        raise error

    return sum(
        (Path(path) / name).lstat().st_blocks * 512
        for path, folders, files in os.walk(folder, onerror=refuse)
        for name in (*folders, *files)
    )


def _remove(folder: Path) -> None:
    """Remove a folder, with folders in it that their owner has closed."""
    for path, folders, _ in os.walk(folder):  # a folder is opened before the walk goes into it
        for name in folders:
            inner = Path(path) / name
            if not inner.is_symlink():
                inner.chmod(0o700)
    shutil.rmtree(folder)


def _rewards(text: str, path: str) -> dict[str, float]:
    try:
        parsed = json.loads(text) if path.endswith(".json") else {"reward": float(text)}
        values = parsed if isinstance(parsed, dict) else {"reward": parsed}
    except ValueError as error:
        raise HarborTestsError(f"the tests wrote no number to {path}: {text[:SHOWN_CHARACTERS]}") from error
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise HarborTestsError(f"the tests wrote the {name} {value!r:.100} to {path}, which is no finite number")
    return {name: float(value) for name, value in values.items()}
