"""The rate that a saturated server generates at, measured without areal: the ceiling of `asynchronous.py`."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.request
from typing import TYPE_CHECKING

import aiohttp
from asynchronous_parts import draw_lengths

if TYPE_CHECKING:
    import argparse
    import subprocess

LEAD = 0.8
"""Share of the measured time for which requests go on before; lengths are mixed by then as they stay."""
KEEP_ALIVE_S = 2.0
"""Servers close idle connections without a word, after five seconds."""


def wait_until_healthy(address: str, process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a server that is starting.

    Raises:
        RuntimeError: it ended, or took too long.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {process.returncode}")
        try:
            with urllib.request.urlopen(f"{address}/server_info", timeout=15):
                return
        except OSError:
            time.sleep(0.5)
    raise RuntimeError(f"the server was not healthy within {limit_s:g} s")


def measure_peak(address: str, arguments: argparse.Namespace, vocabulary: int) -> dict[str, object]:
    """Tokens a second, the higher of two rates, and what server it was.

    One rate is of requests one by one, always as many as asked for; the other of groups, whose requests share a prompt
    and come together, three times as many, so that some wait while others end. A server that fills every free place at
    once interrupts those that it works on more often, so it depends on the server which rate is higher. Kernels are
    compiled by a burst before.
    """
    with urllib.request.urlopen(f"{address}/server_info", timeout=15) as answer:
        version = json.load(answer)["version"]
    asyncio.run(_saturate(address, arguments, vocabulary, arguments.concurrent, 1, is_burst=True))
    single = asyncio.run(_saturate(address, arguments, vocabulary, arguments.concurrent, 1))
    groups = 3 * arguments.concurrent // arguments.group
    grouped = asyncio.run(_saturate(address, arguments, vocabulary, groups, arguments.group))
    rates = {"one_by_one": single, "in_groups": grouped}
    return {"tokens_per_s": max(rates.values()), **rates, "server": f"SGLang {version}"}


async def _saturate(
    address: str, arguments: argparse.Namespace, vocabulary: int, workers: int, size: int, *, is_burst: bool = False
) -> float:
    """Tokens a second of the requests that end within the measured time; each worker has a prompt's under way.

    A burst is over when every worker's first requests are.
    """
    lengths = iter(draw_lengths(arguments.median, 1 << 17, f"peak of {size}"))
    draw, tokens = random.Random(size), 0
    began = time.monotonic() + LEAD * arguments.peak_s
    ends = began + arguments.peak_s

    async def ask(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        nonlocal tokens
        length = next(lengths)
        sampling = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}
        sent = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with session.post(f"{address}/generate", json=sent) as response:
            response.raise_for_status()
            await response.read()
        if began <= time.monotonic() < ends:
            tokens += length

    async def work(session: aiohttp.ClientSession) -> None:
        while time.monotonic() < ends:
            prompt = [draw.randrange(4, vocabulary) for _ in range(arguments.prompt)]
            await asyncio.gather(*(ask(session, prompt) for _ in range(size)))
            if is_burst:
                return

    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None)) as session:
        tasks = [asyncio.create_task(work(session)) for _ in range(workers)]
        await asyncio.wait(tasks, timeout=None if is_burst else ends - time.monotonic())
        failed = [task.exception() for task in tasks if task.done() and task.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            raise RuntimeError(f"requests of the peak rate failed: {failed[0]!r}")
    return tokens / arguments.peak_s
