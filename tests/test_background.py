"""Background work ends its process with its cause, and a blocked event loop is told with the line that blocks it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

BLOCKED = """
import asyncio, time
from areal_core.background import watch_event_loop

def users_function():
    time.sleep({seconds})

async def main():
    watch_event_loop({limit}, lambda text: print("TOLD", text, flush=True))
    await asyncio.sleep(0.6)
    users_function()
    await asyncio.sleep(2)

asyncio.run(main())
print("ENDED WELL")
"""


def run(seconds: float, limit: float, interrupts: str = "default_int_handler") -> subprocess.CompletedProcess[str]:
    """A program whose event loop is blocked for so long; its tests may have inherited that interrupts are ignored."""
    program = f"import signal; signal.signal(signal.SIGINT, signal.{interrupts})" + BLOCKED.format(
        seconds=seconds, limit=limit
    )
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)


def test_who_blocks_the_event_loop_is_told_with_the_line() -> None:
    ended = run(seconds=9, limit=300)
    assert "users_function" in ended.stdout
    assert "the event loop continues" in ended.stdout
    assert ended.stdout.endswith("ENDED WELL\n")


def test_functions_in_threads_that_hold_the_interpreter_are_told_apart() -> None:
    """The event loop then waits for a thread to begin: a call that is areal's own, and no coroutine's fault."""
    held = BLOCKED.replace("users_function()\n    await", "start_thread(lambda: None, 'new')\n    await", 1).replace(
        "import watch_event_loop",
        "import start_thread, watch_event_loop\nimport threading\nstarted = threading.Event.wait\n"
        "threading.Event.wait = lambda *given: time.sleep({seconds}) or started(*given)",
    )
    program = "import signal" + held.format(seconds=7, limit=300)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert "functions in threads hold the interpreter; make clients once" in ended.stdout, ended
    assert "await it" not in ended.stdout


@pytest.mark.parametrize("interrupts", ["default_int_handler", "SIG_IGN"])
def test_who_blocks_it_for_too_long_ends_the_process_with_its_stack(interrupts: str) -> None:
    """Also where a shell has put the program into the background, which ignores interrupts there."""
    ended = run(seconds=15, limit=6, interrupts=interrupts)
    assert "ENDED WELL" not in ended.stdout
    assert "a call has blocked this process for 6 s" in ended.stderr
    assert "users_function" in ended.stderr


def test_an_event_loop_that_has_closed_blocks_nothing() -> None:
    program = BLOCKED.format(seconds=0, limit="float('inf')") + "time.sleep(8)\n"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
    assert ended.stdout == "ENDED WELL\n", ended
