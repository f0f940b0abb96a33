"""A place where code that nobody has read may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a command in a sandbox has ended.

    Attributes:
        exit_code: of the command; negative for the signal that ended it.
        output: what it wrote to its standard output, cut at the sandbox's limit.
        error: the same of its standard error.
        limit: which limit ended it, such as "time" or "memory"; empty where none did.
    """

    exit_code: int
    output: str
    error: str
    limit: str = ""


class Sandbox(Protocol):
    """Runs commands that may be malicious. One object serves all episodes at once.

    What it holds against is said in its documentation, and its limits are its settings: whoever chooses a sandbox in a
    config knows what is risked. Where it cannot work on this machine, making it raises `ConfigError`.
    """

    async def run(
        self,
        command: Sequence[str],
        *,
        files: Mapping[str, str] | None = None,
        input_text: str = "",
        timeout_s: float | None = None,
    ) -> SandboxResult:
        """Run one command in a new sandbox, which is gone afterwards with everything that it started.

        Args:
            command: program and arguments; found in the sandbox's own path.
            files: texts by their relative paths in the folder that the command starts in.
            input_text: its standard input.
            timeout_s: a shorter limit than the setting's, for this command.

        Raises:
            ValueError: a path leads out of the folder, or a text cannot be written.
            RunError: the sandbox itself does not work (any more).
        """
