"""What a supervisor costs that watches many nodes: CPU, memory, and the time until all have come.

    python benchmarks/thousand_wardens.py [--nodes 1000] [--processes 8] [--seconds 30] [--profile FILE]

This program is a true supervisor: it listens, looks whether all nodes see the run's folder, starts processes, hears
beats, watches for silence and tells a view. The nodes are connections from two other programs: each runs the warden's
own code, but for a process that it is told to start, which is a connection that beats as one of areal's own does. The
first of them also tells metrics, once a second. `--processes 0` leaves the wardens alone.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.interfaces.launcher import ProcessSpecification
from areal_core.launchers.warden import Warden
from areal_core.launchers.wardens import BEAT_VARIABLE
from areal_core.messages import ChannelClosed, Credentials, connect
from areal_core.messages.processes import Alive, NodeReady, StartProcess, StepMetrics
from areal_core.runs.folder import RunFolder
from areal_core.runs.supervisor import Supervisor
from areal_core.runs.view import PlainView, RunState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

METRICS = {f"train/metric_{number}": number / 7 for number in range(60)}
PROGRAMS = 2
FIRST = "trainer-0"


class ConnectedWarden(Warden):
    """A true warden whose processes are connections."""

    address = ""

    async def _start(self, order: StartProcess) -> None:
        asyncio.get_running_loop().create_task(beat(self.address, order.name, float(order.environment[BEAT_VARIABLE])))


async def beat(address: str, name: str, every_s: float) -> None:
    """What a process says that works."""
    channel = await connect(address, 120, name)
    began, step = time.monotonic(), 0
    try:
        while True:
            channel.post(Alive("training", time.monotonic() - began, 3600.0))
            if name == FIRST:
                step += 1
                channel.post(StepMetrics({"step": step, "time": time.time(), "time/step_s": 1.0, **METRICS}))
            channel.receive_ready()
            await asyncio.sleep(every_s)
    except ChannelClosed:
        return


async def be_nodes(address: str, names: Sequence[str], scratch: Path) -> None:
    """Wardens until the supervisor is gone."""

    async def one(name: str) -> None:
        channel = await connect(address, 120, "warden")
        channel.post(NodeReady(name, name, "127.0.0.1", "lo", 8, 1 << 40, 8, str(scratch), os.getpid(), sys.executable))
        warden = ConnectedWarden(channel, scratch, 60.0)
        warden.address = address
        await warden.run()

    await asyncio.gather(*map(one, names))


class Connections:
    """A launcher: nodes are connections of a few programs."""

    host = "127.0.0.1"

    def __init__(self, count: int, scratch: Path) -> None:
        self.count, self.scratch = count, scratch
        self.programs: list[subprocess.Popen[bytes]] = []

    def bring(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """See `Launcher.bring`."""
        for number in range(PROGRAMS):
            words = [sys.executable, __file__, "--be", command[3], str(number), str(self.count), str(self.scratch)]
            self.programs.append(subprocess.Popen(words, env={**os.environ, **environment}))
        return self.count

    def lost(self) -> Mapping[str, str]:
        """See `Launcher.lost`."""
        return {}

    def close(self) -> None:
        """See `Launcher.close`."""
        for program in self.programs:
            program.kill()
            program.wait()


def used() -> float:
    """CPU seconds of this program."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    """Bring the nodes, start the processes, watch, and say what it took."""
    state = RunState(RunFolder(folder))
    view = PlainView(state, 10**6, io.StringIO().write)

    def hear(_: Any, said: Any) -> None:
        if isinstance(said, StepMetrics):
            state.add(dict(said.line))

    def tell(line: str) -> None:
        print(f"  | {line}", flush=True)

    launcher = Connections(arguments.nodes, folder)
    supervisor = Supervisor(launcher, Credentials.create(1), lambda name: folder / name, hear, tell)
    await supervisor.listen()
    began, cpu = time.monotonic(), used()
    await supervisor.bring_nodes(folder)
    print(f"{supervisor.node_count} nodes after {time.monotonic() - began:.1f} s, {used() - cpu:.1f} s of CPU")
    began, cpu = time.monotonic(), used()
    started = [
        supervisor.start(ProcessSpecification(f"trainer-{number}", "trainer", ["-"], node=node.name, speaks=True))
        for number, node in enumerate(supervisor.spread(max(1, arguments.nodes * arguments.processes), None))
        if arguments.processes or not number
    ]
    while any(process.channel is None for process in started):
        await asyncio.sleep(0.1)
    print(f"{len(started)} processes after {time.monotonic() - began:.1f} s, {used() - cpu:.1f} s of CPU")

    def update() -> None:
        if state.is_old:
            state.see(supervisor.owner)
        view.update()

    async def stop() -> None:
        await asyncio.sleep(5)  # until all beat in their rhythm
        began, cpu, lag = time.monotonic(), used(), 0.0
        profile = cProfile.Profile() if arguments.profile else None
        if profile is not None:
            profile.enable()
        while (now := time.monotonic()) - began < arguments.seconds:
            await asyncio.sleep(0.1)
            lag = max(lag, time.monotonic() - now - 0.1)
        share = (used() - cpu) / (time.monotonic() - began)
        if profile is not None:
            profile.disable()
            profile.dump_stats(arguments.profile)
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"{100 * share:.1f} % of a core, {memory:.0f} MiB, the event loop late by {1000 * lag:.0f} ms at most")
        supervisor.signals.append(2)
        raise RunError("measured")

    watching = asyncio.ensure_future(supervisor.watch(started[0], update))
    try:
        await stop()
    except RunError:
        if watching.done():
            raise RuntimeError("the supervisor did not watch to the end") from watching.exception()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    await supervisor.close()


def main() -> None:
    """Measure, or be some of the nodes."""
    if sys.argv[1:2] == ["--be"]:
        address, number, count, scratch = sys.argv[2:]
        names = [f"node-{node:05d}" for node in range(int(number), int(count), PROGRAMS)]
        asyncio.run(be_nodes(address, names, Path(scratch)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=8, help="on each node")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--profile", metavar="FILE", help="of the event loop's thread, for pstats")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    main()
