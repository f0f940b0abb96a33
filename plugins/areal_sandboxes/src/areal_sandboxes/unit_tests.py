"""Reward that runs the code of a completion against the row's tests in a sandbox."""

from __future__ import annotations

import asyncio
import hmac
import json
import re
import secrets
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.sdk import Sandbox, SandboxResult
    from areal_sandboxes.config import UnitTestsSettings

HARNESS: Final = "harness.py"
SOURCE: Final = Path(__file__).with_name(HARNESS).read_text(encoding="utf-8")
FENCED: Final = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)^[ \t]*```[ \t]*$", re.MULTILINE | re.DOTALL)


def code_in(completion: str) -> str:
    """Return the last fenced block of a completion, or the whole completion if it has none."""
    blocks = FENCED.findall(completion)
    return str(blocks[-1]) if blocks else completion


class UnitTests:
    """Reward of 1 if the code of a completion passes the row's tests, or the share of tests that it passes.

    Tests of the form {input, output} compare a program's standard output; the expected output never enters the sandbox.
    Tests as asserts run in the sandbox, but in another process than the code. The code gets the arguments of each call
    and returns data; it sees neither the tests nor the expected values.

    Args:
        settings: sandbox, key of the row, limits.
    """

    def __init__(self, settings: UnitTestsSettings) -> None:
        self._settings = settings
        self._sandbox: Sandbox = settings.sandbox.build()
        self._counts: Counter[str] = Counter()
        self.max_concurrency = settings.max_concurrency

    async def __call__(self, completion: str, row: Mapping[str, Any]) -> float:
        """Return the reward, from 0 to 1.

        Args:
            completion: text of the policy's answer.
            row: row of the data set; it holds the tests.

        Raises:
            ValueError: the row has no tests, tests of an unknown form, or tests that any program or none would pass.
            RunError: the sandbox does not work any more.
        """
        tests = self._tests(row)
        code = code_in(completion)
        passed = [False] * len(tests)
        self._counts["completions"] += 1
        try:
            code.encode()
            async with asyncio.timeout(self._settings.total_s):
                if isinstance(tests[0], str):
                    passed = await self._asserts(code, [str(test) for test in tests])
                else:
                    await self._programs(code, tests, passed)
        except TimeoutError:
            self._counts["out_of_time"] += 1
        except UnicodeEncodeError:
            self._counts["no_text"] += 1
        self._counts["passed"] += all(passed)
        return sum(passed) / len(passed) if self._settings.share else float(all(passed))

    def pop_metrics(self) -> dict[str, float]:
        """Return the counts since the last call: completions, those that passed, and limits that ended code."""
        metrics: dict[str, float] = dict(self._counts)
        self._counts.clear()
        return metrics

    def _tests(self, row: Mapping[str, Any]) -> Sequence[Any]:
        key = self._settings.tests
        value = row.get(key)
        tests = [value] if isinstance(value, str) else value
        if isinstance(tests, list | tuple) and tests:
            if all(isinstance(test, str) and test.strip() for test in tests):
                return tests
            if all(_is_program_test(test) for test in tests):
                return tests
        raise ValueError(
            f"the row has no tests: its key {key!r} must be a text of asserts, a list of them, or a list of "
            f"{{input, output}}; it is {str(value)[:200]!r}"
        )

    async def _asserts(self, code: str, tests: list[str]) -> list[bool]:
        """Return whether each test passed. A verdict without a valid seal fails: the code cannot know its key."""
        key = secrets.token_hex(16)
        files = {self._settings.file: code, HARNESS: SOURCE}
        command = ["python3", HARNESS, self._settings.file]
        result = await self._sandbox.run(command, files=files, input_text=json.dumps({"key": key, "tests": tests}))
        self._count_limit(result)
        verdict, _, seal = result.output.rstrip("\n").rpartition("\n")
        if seal != hmac.new(key.encode(), verdict.encode(), "sha256").hexdigest():
            return [False]
        passed, fault = json.loads(verdict)
        if fault:
            raise ValueError(f"the tests of the row, its key {self._settings.tests!r}, are wrong: {fault}")
        return list(passed)

    async def _programs(self, code: str, tests: Sequence[Mapping[str, str]], passed: list[bool]) -> None:
        """Run {input, output} tests in order and set their results in `passed`."""
        settings = self._settings
        for number, test in enumerate(tests):
            result = await self._sandbox.run(settings.command, files={settings.file: code}, input_text=test["input"])
            self._count_limit(result)
            is_right = result.exit_code == 0 and not result.limit
            passed[number] = is_right and _lines(result.output) == _lines(test["output"])
            if not passed[number] and not settings.share:
                return

    def _count_limit(self, result: SandboxResult) -> None:
        if result.limit:
            self._counts[f"ended_by_{result.limit}"] += 1


def _is_program_test(test: object) -> bool:
    return isinstance(test, dict) and all(isinstance(test.get(key), str) for key in ("input", "output"))


def _lines(text: str) -> list[str]:
    """Return the lines of a program's output without trailing blanks and trailing empty lines."""
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip().split("\n")
