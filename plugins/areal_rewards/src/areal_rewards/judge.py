"""A language model behind an OpenAI-compatible address that judges completions."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import sqlite3
from collections import OrderedDict
from contextlib import closing
from typing import TYPE_CHECKING, Any

from areal_core.plugins import register
from areal_rewards.asking import Asker
from areal_rewards.config import JudgeSettings
from areal_rewards.templates import fill

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

REMEMBERED = 10_000
"""Answers that are kept in memory; a run may ask for weeks."""


@register("reward_functions", summary="verdict of a language model with an OpenAI-compatible API, from 0 to 1")
class Judge:
    """A reward: a prompt to a judge, the number that stands in its answer, brought to a scale from 0 to 1.

    Args:
        settings: address, prompt, form of the verdict, limits.
    """

    Config = JudgeSettings

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        url = f"{settings.address.rstrip('/')}/chat/completions"
        self._asker = Asker("judge", "judge", url, settings, settings.key)
        self._pattern = re.compile(settings.pattern)
        self._known = Answers(settings.cache)
        self._under_way: dict[str, asyncio.Future[str]] = {}
        self._counts = self._asker.counts
        self.max_concurrency = settings.max_concurrency

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """(verdict - lowest) / (highest - lowest).

        Raises:
            ValueError: the judge's answer has no verdict, or one out of the scale; it is not asked again for it.
            RuntimeError: the judge could not be asked, in all tries.
        """
        settings = self._settings
        asked = fill(settings.prompt, {**row, "prompt": prompt, "completion": completion})
        answer = await self._answer(asked)
        found = self._pattern.findall(answer)
        if not found:
            raise ValueError(f"the judge's answer has nothing of the form {settings.pattern}: {answer[-200:]!r}")
        verdict = float(found[-1])
        if not settings.lowest <= verdict <= settings.highest:
            raise ValueError(f"the judge's verdict {verdict:g} is not from {settings.lowest:g} to {settings.highest:g}")
        return (verdict - settings.lowest) / (settings.highest - settings.lowest)

    def pop_metrics(self) -> dict[str, float]:
        """Requests, tokens and cost since the last call; see `areal_core.sdk.Reward`."""
        taken: dict[str, float] = dict(self._counts)
        self._counts.clear()
        return taken

    async def _answer(self, asked: str) -> str:
        """What the judge says; the same question is asked once, also by completions that ask it at the same time."""
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": asked}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        key = hashlib.sha256(json.dumps([self._settings.address, body]).encode()).hexdigest()
        if (known := self._known.get(key)) is not None:
            self._counts["cached"] += 1
            return known
        if key in self._under_way:
            self._counts["cached"] += 1
        else:
            asking = self._under_way[key] = asyncio.ensure_future(self._asker.ask(body, self._read))
            asking.add_done_callback(lambda done: self._answered(key, done))
        # Whoever asked first may run out of time; the others wait for the same answer.
        return await asyncio.shield(self._under_way[key])

    def _answered(self, key: str, asking: asyncio.Future[str]) -> None:
        del self._under_way[key]
        if not asking.cancelled() and asking.exception() is None and self._pattern.search(asking.result()):
            self._known.put(key, asking.result())

    async def _read(self, response: Any) -> str:
        text = await response.text()
        answer = json.loads(text)
        said = answer["choices"][0]["message"]["content"]
        if not isinstance(said, str):
            raise ValueError(f"its message holds no text: {text[:200]}")
        used = answer.get("usage") or {}
        read, written = int(used.get("prompt_tokens", 0)), int(used.get("completion_tokens", 0))
        self._counts["prompt_tokens"] += read
        self._counts["completion_tokens"] += written
        price = self._settings.input_price * read + self._settings.output_price * written
        self._counts["cost"] += price / 1e6  # type: ignore[assignment]  # a counter of floats
        return said


class Answers:
    """What a judge has answered: the latest in memory, or all in a file, which runs and processes may share."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory: OrderedDict[str, str] = OrderedDict()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        """The answer, where it is known."""
        if self._path is None:
            return self._memory.get(key)
        with closing(self._open()) as database:
            found = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if found is None else str(found[0])

    def put(self, key: str, answer: str) -> None:
        """Remember an answer."""
        if self._path is not None:
            with closing(self._open()) as database, database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
            return
        self._memory[key] = answer
        while len(self._memory) > REMEMBERED:
            self._memory.popitem(last=False)

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=30)
