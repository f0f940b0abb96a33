"""The rate that a saturated server generates at, measured without areal: the ceiling of `asynchronous.py`."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import socket
import time
import urllib.request
from typing import TYPE_CHECKING

import aiohttp
from asynchronous_parts import draw_lengths

if TYPE_CHECKING:
    import argparse
    import subprocess

LEAD = 0.6
"""Share of the measured time for which requests go on before; lengths are mixed by then as they stay."""


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    """Tokens a second, and what server it was."""
    with urllib.request.urlopen(f"{address}/server_info", timeout=15) as answer:
        version = json.load(answer)["version"]
    rate = asyncio.run(_saturate(address, arguments, vocabulary))
    return {"tokens_per_s": rate, "server": f"SGLang {version}", "concurrent": arguments.concurrent}


async def _saturate(address: str, arguments: argparse.Namespace, vocabulary: int) -> float:
    """Tokens of the requests that end within the measured time, with always as many under way."""
    lengths = iter(draw_lengths(arguments.median, 1 << 17, "peak"))
    draw, tokens = random.Random(0), 0
    began = time.monotonic() + LEAD * arguments.peak_s
    ends = began + arguments.peak_s
    numbers = itertools.count()

    async def work(session: aiohttp.ClientSession) -> None:
        nonlocal tokens
        while time.monotonic() < ends:
            length = next(lengths)
            sent = {
                "rid": f"peak-{next(numbers)}",
                "input_ids": [draw.randrange(4, vocabulary) for _ in range(arguments.prompt)],
                "sampling_params": {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True},
                "return_logprob": True,
            }
            async with session.post(f"{address}/generate", json=sent) as response:
                response.raise_for_status()
                await response.read()
            if began <= time.monotonic() < ends:
                tokens += length

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        tasks = [asyncio.create_task(work(session)) for _ in range(arguments.concurrent)]
        await asyncio.sleep(ends - time.monotonic())
        failed = [task.exception() for task in tasks if task.done() and task.exception() is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if failed:
            raise RuntimeError(f"requests of the peak rate failed: {failed[0]!r}")
    return tokens / arguments.peak_s
