"""Programs that mean harm; tests and `benchmarks/sandboxes.py` run them in sandboxes."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_core.config import select

SECRET = secrets.token_hex(16)
BEGINS = "import os, signal, socket, sys, time, glob\nTARGETS = dict(word.split('=', 1) for word in sys.argv[2:])\n"
"""In front of each program: `sys.argv[1]` marks its processes, and `TARGETS` is what it goes for."""


@dataclass(frozen=True)
class Program:
    """What it does, its code, and the limits by one of which it may be ended. It prints ESCAPED where it got out."""

    name: str
    code: str
    limits: tuple[str, ...] = ("",)


PROGRAMS = [
    Program("forks without end", "while True:\n  try: os.fork()\n  except OSError: pass", ("time", "cpu")),
    Program(
        "forks without end in new sessions",
        "while True:\n  try:\n    if os.fork() == 0: os.setsid()\n  except OSError: pass",
        ("time", "cpu"),
    ),
    Program(
        "writes 10 GB to files",
        "total = 0\n"
        "for folder, _, _ in os.walk('/'):\n"
        "  if folder.startswith(('/proc', '/sys')): continue\n"
        "  for number in range(99):\n"
        "    size = 0\n"
        "    try:\n"
        "      with open(f'{folder}/large-{number}', 'wb', buffering=0) as file:\n"
        "        while total < 10 << 30: size += file.write(b'x' * (1 << 20)); total += 1 << 20\n"
        "    except OSError: pass\n"
        "    if not size: break\n"
        "print('ESCAPED' if total > 200 << 20 else 'wrote', total >> 20, 'MiB')",
    ),
    Program(
        "allocates without end",
        "held = []\nwhile True:\n  held.append(b'x' * (16 << 20))\n  if len(held) > 64: print('ESCAPED')",
        ("", "memory"),
    ),
    Program(
        "allocates in many processes",
        "for _ in range(15):\n"
        "  if os.fork() == 0: break\n"
        "held = [b'x' * (16 << 20) for _ in range(6)]\n"
        "time.sleep(600)",
        ("memory", "time"),
    ),
    Program(
        "opens sockets to the outside",
        "for family in (socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):\n"
        "  try: socket.socket(family, socket.SOCK_SEQPACKET if family == socket.AF_ALG else socket.SOCK_RAW if "
        "family < 40 else socket.SOCK_STREAM); print('ESCAPED', family)\n"
        "  except OSError: pass\n"
        "try: socket.create_connection(('1.1.1.1', 53), timeout=2); print('ESCAPED')\n"
        "except OSError as error: print(error)",
    ),
    Program(
        "connects to loopback",
        "try: socket.create_connection(('127.0.0.1', int(TARGETS['port'])), timeout=2); print('ESCAPED')\n"
        "except OSError as error: print(error)",
    ),
    Program(
        "reads the run folder and the home",
        "try: print('ESCAPED', open(TARGETS['file']).read())\n"
        "except OSError as error: print(error)\n"
        "for folder in (TARGETS['home'], os.path.dirname(TARGETS['file']), '/root', '/etc', '/var/lib'):\n"
        "  try: files = [name for name in os.listdir(folder) if os.path.isfile(os.path.join(folder, name))]\n"
        "  except OSError: continue\n"
        "  print('ESCAPED' if set(files) - {'ld.so.cache'} else 'empty', folder, files[:5])",
    ),
    Program(
        "reads environments",
        "for path in glob.glob('/proc/*/environ'):\n"
        "  try: text = open(path).read()\n"
        "  except OSError: continue\n"
        "  print('ESCAPED' if TARGETS['variable'] in text else 'clean', path)",
    ),
    Program(
        "looks into processes",
        "print('ESCAPED' if any(name.isdigit() and int(name) > 60 for name in os.listdir('/proc')) else 'alone')\n"
        "for path in ('/proc/1/mem', '/proc/1/fd/1', '/proc/kcore', '/proc/sysrq-trigger', '/dev/mem', '/dev/kmsg'):\n"
        "  try: open(path, 'rb+', buffering=0).write(b'x'); print('ESCAPED', path)\n"
        "  except OSError: pass",
    ),
    Program(
        "kills its parent and all others",
        "for number in (int(TARGETS['pid']), os.getppid(), 1, -1):\n"
        "  try: os.kill(number, signal.SIGKILL)\n"
        "  except OSError as error: print(number, error)\n"
        "print('goes on')",
    ),
    Program(
        "ignores signals and sleeps",
        "for number in range(1, 65):\n"
        "  try: signal.signal(number, signal.SIG_IGN)\n"
        "  except (OSError, ValueError): pass\n"
        "time.sleep(600)",
        ("time",),
    ),
    Program(
        "leaves processes behind",
        "for _ in range(5):\n"
        "  if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "      for number in range(99):\n"
        "        try: os.close(number)\n"
        "        except OSError: pass\n"
        "      time.sleep(600)\n"
        "    os._exit(0)",
    ),
    Program("prints without end", "while True: sys.stdout.write('x' * 65536)", ("output",)),
    Program("complains without end", "while True: sys.stderr.write('x' * 65536)", ("output",)),
    Program("computes without end", "while True: pass", ("cpu", "time")),
    Program(
        "raises its own limits",
        "import resource\n"
        "for name in ('NPROC', 'AS', 'CPU', 'FSIZE', 'NOFILE', 'CORE'):\n"
        "  number = getattr(resource, 'RLIMIT_' + name)\n"
        "  try: resource.setrlimit(number, (resource.getrlimit(number)[1] + 1,) * 2); print('ESCAPED', name)\n"
        "  except (OSError, ValueError) as error: print(error)",
    ),
    Program(
        "makes namespaces and mounts",
        "import ctypes\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000):\n"
        "  if libc.unshare(flag) == 0: print('ESCAPED', hex(flag))\n"
        "if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0: print('ESCAPED')\n"
        "if libc.mount(None, b'/', None, 32 | 4096, None) == 0: print('ESCAPED')\n"
        "if libc.syscall(425, 1, b'\\0' * 120) >= 0: print('ESCAPED io_uring')\n"
        "if libc.syscall(250, 0, -5, 1, 0, 0) >= 0: print('ESCAPED keyctl')\n"
        "if libc.ptrace(16, 1, 0, 0) == 0: print('ESCAPED ptrace')",
    ),
]


def left(marker: str) -> list[int]:
    """Processes of this machine that have a word in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if marker.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


def words_of(program: Program, marker: str, file: Path, port: int) -> list[str]:
    """The command of a program, with what it goes for."""
    targets = {"file": file, "home": Path.home(), "port": port, "pid": os.getpid(), "variable": SECRET}
    return ["python3", "-c", BEGINS + program.code, marker, *(f"{key}={value}" for key, value in targets.items())]


@pytest.fixture
def port():
    """Of a server of this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def bubblewrap():
    """Makes one with settings; skips where it is not installed."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed here")
    from areal_sandboxes.bubblewrap import Bubblewrap
    from areal_sandboxes.config import BubblewrapSettings

    return lambda **settings: Bubblewrap(BubblewrapSettings(**settings))


@pytest.fixture
def reward(bubblewrap):
    """Makes the reward as a run does, in the true sandbox, with the plugin alone."""
    bubblewrap()

    def make(**settings):
        return select("reward_functions", {"type": "sandboxes/unit_tests", **settings}).build()

    return make
