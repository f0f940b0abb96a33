"""What sandboxes hold against and what they cost: a table for each.

python benchmarks/sandboxes.py [held|cost]   needs bubblewrap; a cgroup limits memory where one can be made
"""

from __future__ import annotations

import asyncio
import importlib.util
import secrets
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_sandboxes.bubblewrap import Bubblewrap
from areal_sandboxes.config import BubblewrapSettings, NoneSettings
from areal_sandboxes.plain import PlainProcess

ROOT = Path(__file__).parents[1]
SMALL: dict[str, Any] = {"memory_mib": 256, "processes": 24, "disk_mib": 64, "cpu_s": 3, "time_s": 4.0}
RUNS = 60


def load(path: str) -> Any:
    """A file of the repository as a module."""
    specification = importlib.util.spec_from_file_location("programs", ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["programs"] = module
    specification.loader.exec_module(module)
    return module


async def show_held() -> None:
    """Every program that means harm, in the sandbox."""
    programs = load("plugins/areal_sandboxes/tests/conftest.py")
    sandbox = Bubblewrap(BubblewrapSettings(**SMALL))
    print(f"bubblewrap here: {sandbox.description}\n")
    print(
        "| a program that | is ended by | exit code | seconds | escaped | processes left |\n|---|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        file = Path(folder, "config.yaml")
        file.write_text(programs.SECRET)
        for program in programs.PROGRAMS:
            marker, begin = secrets.token_hex(16), time.monotonic()
            result = await sandbox.run(programs.words_of(program, marker, file, server.getsockname()[1]))
            took, escaped = time.monotonic() - begin, "ESCAPED" in result.output or programs.SECRET in result.output
            left = len(programs.left(marker))
            row = [program.name, result.limit or "itself", result.exit_code, f"{took:.2f}", escaped, left]
            print("|", " | ".join(map(str, row)), "|", flush=True)


async def show_cost() -> None:
    """Seconds of one command, and commands a second that one core carries."""
    kinds = {
        "plain process": PlainProcess(NoneSettings(max_concurrency=1)),
        "bubblewrap, no cgroup": Bubblewrap(BubblewrapSettings(max_concurrency=1, cgroup="never")),
        "bubblewrap": Bubblewrap(BubblewrapSettings(max_concurrency=1)),
    }
    commands = {"true": ["true"], "python3 -S -c pass": ["python3", "-S", "-c", "pass"]}
    print("| sandbox | command | median ms | a second, one at a time |\n|---|---|---|---|")
    for name, sandbox in kinds.items():
        for words, command in commands.items():
            times = []
            for _ in range(RUNS):
                begin = time.monotonic()
                result = await sandbox.run(command)
                assert result.exit_code == 0, result
                times.append(time.monotonic() - begin)
            print(f"| {name} | {words} | {1000 * statistics.median(times):.1f} | {RUNS / sum(times):.0f} |", flush=True)


if __name__ == "__main__":
    chosen = sys.argv[1:] or ["held", "cost"]
    for each in chosen:
        asyncio.run({"held": show_held, "cost": show_cost}[each]())
        print()
