"""A process that has imported what takes long, and forks members of this machine: `python -m ...fork_server`.

It imports a fixed list, runs no operation of any library, touches no GPU, and stays of one thread: a fork behind one
parallel operation hangs at its first. It is the guard of everything that it has forked. Orders come as lines of JSON
over standard input, answers go over standard output; when standard input ends, everything ends.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from areal_core.launchers.guard import (
    HUB_VARIABLE,
    SCRATCH_VARIABLE,
    Guard,
    Guarded,
    adopt_orphans,
    make_scratch,
    open_log,
)
from areal_core.launchers.member import CONNECT_TIMEOUT_S, GUARDED_VARIABLE, log_of
from areal_core.launchers.places import GROUP_VARIABLE, own_place
from areal_core.messages import Credentials, PeerClosed, connect_blocking

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

PRELOADED = (
    "torch",
    "torch.distributed",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.generation",
    "transformers.modeling_utils",
    "safetensors.torch",
    "areal_core.config",
)
ONE_THREAD = {
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow, which transformers imports where it is installed
}


def main() -> int:
    """Import, then fork as asked."""
    orders = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # the driver decides
    adopt_orphans()
    for name in PRELOADED:
        with suppress(ImportError):  # transformers is not everywhere
            importlib.import_module(name)
    gc.collect()
    gc.freeze()

    def answer(**facts: Any) -> None:
        with suppress(OSError):
            answers.write(f"{json.dumps(facts)}\n")
            answers.flush()

    answer(threads=len(list(Path("/proc/self/task").iterdir())))
    guard, buffer = Guard(), b""
    guard.listen(orders.fileno())
    while True:
        ready, ended = guard.wait()
        for pid, code in ended.items():
            answer(ended=pid, code=code)
        if orders.fileno() in ready:
            if not (data := orders.read(1 << 20)):
                guard.end_all()
                return 0
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                try:
                    answer(
                        number=order["number"], pid=_fork(order["argv"], order["environment"], guard, orders, answers)
                    )
                except (OSError, PeerClosed) as error:
                    answer(number=order["number"], failed=str(error))


def _fork(argv: list[str], environment: dict[str, str], guard: Guard, *inherited: Any) -> int:
    """Fork a member; its process id."""
    place, shown = own_place(environment), Credentials.from_variables(environment)
    connection = connect_blocking(environment[HUB_VARIABLE], CONNECT_TIMEOUT_S, "member", shown)
    scratch, log = make_scratch(), log_of(environment, place.name)
    own = {**environment, SCRATCH_VARIABLE: str(scratch), GUARDED_VARIABLE: str(connection.fileno())}
    if pid := os.fork():
        hub, group = environment[HUB_VARIABLE], environment[GROUP_VARIABLE]
        guard.add(Guarded(pid, connection, hub, shown, group, place.number, log, scratch))
        return pid
    guard.forget()
    for file in inherited:
        os.close(file.fileno())
    _become(argv, own, connection, log)


def _become(argv: list[str], environment: Mapping[str, str], connection: socket.socket, log: Path | None) -> NoReturn:
    """The child's life: as if `python -m MODULE` had been started in this environment."""
    code = 1
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        connection.detach()
        os.environ.clear()
        os.environ.update(environment)
        if log is not None:
            open_log(log)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else every member would draw the same numbers
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as Python ends a program
        traceback.print_exc()
    with suppress(BaseException):
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
