"""Reward by a language model that judges completions, behind an OpenAI-compatible API."""

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
from areal_rewards.client import JSONClient
from areal_rewards.config import JudgeSettings
from areal_rewards.templates import fill

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MAX_CACHED = 10_000
"""Number of answers that the cache in memory keeps."""


@register("reward_functions", summary="verdict of a language model with an OpenAI-compatible API, from 0 to 1")
class Judge:
    """Reward that asks a judge for a verdict, a number, and scales it to 0 to 1.

    Args:
        settings: address, question, form and scale of the verdict, limits.
    """

    Config = JudgeSettings

    def __init__(self, settings: JudgeSettings) -> None:
        self._settings = settings
        url = f"{settings.address.rstrip('/')}/chat/completions"
        self._client = JSONClient("judge", "judge", url, settings, settings.key)
        self._pattern = re.compile(settings.pattern)
        self._cache = AnswerCache(settings.cache)
        self._pending: dict[str, asyncio.Future[str]] = {}
        self._counts = self._client.counts
        self.max_concurrency = settings.max_concurrency

    async def __call__(self, prompt: str, completion: str, row: Mapping[str, Any]) -> float:
        """Return the verdict as a reward: (verdict - lowest) / (highest - lowest).

        Args:
            prompt: text of the prompt.
            completion: text of the policy's answer.
            row: row of the data set; its columns can be used in the question.

        Raises:
            ValueError: the judge's answer has no verdict, or one outside the scale. Such an answer is not retried.
            RuntimeError: all requests to the judge failed.
        """
        settings = self._settings
        question = fill(settings.prompt, {**row, "prompt": prompt, "completion": completion})
        answer = await self._answer(question)
        verdicts = self._pattern.findall(answer)
        if not verdicts:
            raise ValueError(f"the judge's answer does not match {settings.pattern}: {answer[-200:]!r}")
        verdict = float(verdicts[-1])
        if not settings.lowest <= verdict <= settings.highest:
            raise ValueError(f"the judge's verdict {verdict:g} is not from {settings.lowest:g} to {settings.highest:g}")
        return (verdict - settings.lowest) / (settings.highest - settings.lowest)

    def pop_metrics(self) -> dict[str, float]:
        """Requests, tokens and cost since the last call; see `areal_core.sdk.Reward`."""
        metrics: dict[str, float] = dict(self._counts)
        self._counts.clear()
        return metrics

    async def _answer(self, question: str) -> str:
        """Return the judge's answer. Equal questions are sent once, even if they are asked at the same time."""
        body = {
            "model": self._settings.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": self._settings.temperature,
            "max_tokens": self._settings.max_tokens,
        }
        key = hashlib.sha256(json.dumps([self._settings.address, body]).encode()).hexdigest()
        if (cached := self._cache.get(key)) is not None:
            self._counts["cached"] += 1
            return cached
        if key in self._pending:
            self._counts["cached"] += 1
        else:
            task = self._pending[key] = asyncio.ensure_future(self._client.post(body, self._read))
            task.add_done_callback(lambda done: self._on_answer(key, done))
        # Shield the request: if this completion times out, others may be waiting for the same answer.
        return await asyncio.shield(self._pending[key])

    def _on_answer(self, key: str, task: asyncio.Future[str]) -> None:
        del self._pending[key]
        if not task.cancelled() and task.exception() is None and self._pattern.search(task.result()):
            self._cache.put(key, task.result())

    async def _read(self, response: Any) -> str:
        text = await response.text()
        answer = json.loads(text)
        content = answer["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise ValueError(f"its message has no text: {text[:200]}")
        usage = answer.get("usage") or {}
        prompt_tokens = int(usage.get("prompt_tokens", 0))
        completion_tokens = int(usage.get("completion_tokens", 0))
        self._counts["prompt_tokens"] += prompt_tokens
        self._counts["completion_tokens"] += completion_tokens
        price = self._settings.input_price * prompt_tokens + self._settings.output_price * completion_tokens
        self._counts["cost"] += price / 1e6  # type: ignore[assignment]  # a counter of floats
        return content


class AnswerCache:
    """Answers of the judge by key.

    Args:
        path: SQLite file that runs and processes may share; None: keep the latest `MAX_CACHED` answers in memory.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._memory: OrderedDict[str, str] = OrderedDict()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with closing(self._open()) as database, database:
                database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        """Return the answer for a key, or None."""
        if self._path is None:
            return self._memory.get(key)
        with closing(self._open()) as database:
            row = database.execute("SELECT answer FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, answer: str) -> None:
        """Store an answer."""
        if self._path is not None:
            with closing(self._open()) as database, database:
                database.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))
            return
        self._memory[key] = answer
        while len(self._memory) > MAX_CACHED:
            self._memory.popitem(last=False)

    def _open(self) -> sqlite3.Connection:
        assert self._path is not None
        return sqlite3.connect(self._path, timeout=30)
