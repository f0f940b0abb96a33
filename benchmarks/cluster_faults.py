"""Faults of each role in true runs on a cluster of three virtual nodes of this machine, and what became of the run.

    python benchmarks/cluster_faults.py ray|slurm [--only WORD ...] [--out TABLE.json]

Each row is a run of its own: two ranks, a controller, reward processes, an embedded engine. After three steps one thing
happens to it; then it must come to its last step by itself, or end and say so, and then be resumed. Needs root, and
what the tests of the two launchers need (docs/clusters-ray.md, docs/clusters-slurm.md). Some thirty minutes each.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clusters import AREAL, STEPS, Ray, Run, Slurm, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

SILENCE_S = 80.0
"""Longer than the lease of 60 s, so that what was silent must find itself given up."""
NOTICED = re.compile(
    r"was killed|was lost|is lost|is silent|silent for|is gone|left out|ended with|going back|replaced|queued again"
)


@dataclass
class Row:
    """What became of a run."""

    fault: str
    noticed_s: float | None = None
    """Until the first line that tells of it."""
    goes_on_s: float | None = None
    """Until the next step was done."""
    happened: str = ""
    exit_code: int | None = None
    resumed: str = ""
    steps: int = 0
    left: int = 0
    """Processes of the run anywhere, 100 s after its end."""
    audit: str = ""


def kill(name: str) -> Callable[[Any, Run], None]:
    """SIGKILL for a process of the run."""
    return lambda cluster, run: os.kill(run.pid(name), signal.SIGKILL)


def silence(name: str) -> Callable[[Any, Run], None]:
    """SIGSTOP for a process, for longer than the lease, and SIGCONT."""

    def stop(cluster: Any, run: Run) -> None:
        pid = run.pid(name)
        os.kill(pid, signal.SIGSTOP)
        later(lambda: os.kill(pid, signal.SIGCONT))

    return stop


def kill_warden(cluster: Any, run: Run) -> None:
    """Of the node of the last rank."""
    os.kill(run.pid(f"warden {run.node('trainer-1')}"), signal.SIGKILL)


def lose_node(of: str) -> Callable[[Any, Run], None]:
    """Switch off the node of a process; a batch host comes back, for SLURM's requeued job waits for it."""

    def switch_off(cluster: Any, run: Run) -> None:
        name = run.node(of)
        cluster.kill_node(name)
        if isinstance(cluster, Slurm) and of == "trainer-0":
            later(lambda: cluster.restore_node(name))

    return switch_off


def silence_node(cluster: Any, run: Run) -> None:
    """Stop everything on a node for longer than the lease; then it wakes."""
    name = run.node("trainer-1")
    cluster.signal_node(name, signal.SIGSTOP)
    later(lambda: cluster.signal_node(name, signal.SIGCONT))


def kill_parent(cluster: Any, run: Run) -> None:
    """The supervisor."""
    cluster.kill_parent(run)


def kill_head(cluster: Any, run: Run) -> None:
    """What the cluster is managed by; SLURM's comes back, for without it nobody knows how a job is."""
    del run
    cluster.kill_head()
    if isinstance(cluster, Slurm):
        later(cluster.restore_head)


FAULTS: dict[str, Callable[[Any, Run], None]] = {
    "rank 0 killed": kill("trainer-0"),
    "rank 1 killed": kill("trainer-1"),
    "controller killed": kill("controller"),
    "engine killed": kill("engine"),
    "reward process killed": kill("reward"),
    "warden killed": kill_warden,
    "rank 1 stopped 80 s": silence("trainer-1"),
    "controller stopped 80 s": silence("controller"),
    "node of rank 1 lost": lose_node("trainer-1"),
    "node of rank 1 stopped 80 s": silence_node,
    "node of rank 0 lost": lose_node("trainer-0"),
    "parent killed": kill_parent,
    "head lost": kill_head,
}
_later: list[tuple[float, Callable[[], None]]] = []


def later(action: Callable[[], None]) -> None:
    """Do it when the silence is over."""
    _later.append((time.monotonic() + SILENCE_S, action))


def do_what_is_due() -> None:
    """What `later` was told."""
    while _later and _later[0][0] <= time.monotonic():
        with suppress(ProcessLookupError, KeyError, subprocess.CalledProcessError):
            _later.pop(0)[1]()


def try_fault(cluster: Any, run: Run, name: str, fault: Callable[[Any, Run], None]) -> Row:
    """One run, one fault."""
    row = Row(name)
    cluster.prepare()
    cluster.start(run)
    wait_for(lambda: run.steps() >= 3 or cluster.end() is not None, "three steps")
    if cluster.end() is not None:
        raise RuntimeError(f"the run did not come to three steps:\n{cluster.log()[-3000:]}")
    known, done, began = len(cluster.log()), run.steps(), time.monotonic()
    fault(cluster, run)

    def look() -> bool:
        do_what_is_due()
        since = time.monotonic() - began
        if row.noticed_s is None and (found := NOTICED.search(news := cluster.log()[known:])):
            row.noticed_s = since
            row.happened = news[news.rfind("\n", 0, found.start()) + 1 :].partition("\n")[0]
        if row.goes_on_s is None and run.steps() > done and row.noticed_s is not None:
            row.goes_on_s = since
        return cluster.end() is not None and not _later

    wait_for(look, f"the end of the run\n{cluster.log()[known:]}")
    row.exit_code = cluster.end()
    news = cluster.log()[known:]
    back = re.findall(r"going back to the last checkpoint|begins anew|queued again|is started again|replaced", news)
    row.happened += f" -> {', '.join(dict.fromkeys(back))}" if back else ""
    with suppress(TimeoutError):
        wait_for(lambda: not run.processes(), "the end of all processes", 100)
    row.left = len(run.processes())
    if row.exit_code != 0:
        if name == "head lost" and isinstance(cluster, Ray):
            cluster.restore_head()
        cluster.prepare()
        cluster.start(run, resume=True)
        wait_for(lambda: cluster.end() is not None, "the end of the resumed run")
        row.resumed = f"exit code {cluster.end()}"
    row.steps = run.steps()
    if name == "head lost" and row.exit_code == 0 and isinstance(cluster, Ray):
        cluster.restore_head()
    asked = [*AREAL, "audit", "run", "--json"]
    audit = subprocess.run(asked, cwd=run.folder, capture_output=True, text=True, check=False)
    row.audit = "clean" if audit.returncode == 0 else f"exit code {audit.returncode}: {audit.stdout[-300:]}"
    if row.exit_code != 0 or row.steps != STEPS or row.left or row.audit != "clean":
        print(cluster.log()[known:][-4000:], flush=True)
    return row


def seconds(value: float | None) -> str:
    """For a cell."""
    return "-" if value is None else f"{value:.1f}"


HEADER = (
    "| fault | noticed s | next step s | what was told | exit | resumed | steps | left | audit |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line_of(row: Row) -> str:
    """Of the table."""
    times = (seconds(row.noticed_s), seconds(row.goes_on_s))
    cells = (row.fault, *times, row.happened, row.exit_code, row.resumed, row.steps, row.left, row.audit)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """All faults in a row; the table is written as it grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cluster", choices=["ray", "slurm"])
    parser.add_argument("--only", nargs="*", default=[], help="faults whose name has one of these words in it")
    parser.add_argument("--out", type=Path, help="rows as JSON")
    arguments = parser.parse_args()
    base = Path(tempfile.mkdtemp(prefix="areal-faults-", dir="/tmp"))
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", AREAL_CACHE=str(base / "cache"))
    rows: list[Row] = []
    (base / "cluster").mkdir()
    cluster: Any = (Ray if arguments.cluster == "ray" else Slurm)(base / "cluster")
    names = [name for name in FAULTS if not arguments.only or any(word in name for word in arguments.only)]
    print(HEADER, flush=True)
    try:
        for number, name in enumerate(names):
            folder = base / f"run-{number}"
            folder.mkdir()
            try:
                row = try_fault(cluster, Run(folder), name, FAULTS[name])
            except (TimeoutError, LookupError, RuntimeError, AssertionError, StopIteration) as error:
                row = Row(name, happened=f"{type(error).__name__}: {error}")
            _later.clear()
            rows.append(row)
            print(line_of(row), flush=True)
            if arguments.out:
                arguments.out.write_text(json.dumps([asdict(row) for row in rows], indent=1))
            cluster.reset()
    finally:
        cluster.close()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
