"""Make this machine one of a run's, however this was started: torchrun, mpirun, ssh, Kubernetes, or by hand.

Waits for the run, starts what its driver places here, stays through its attempts, and ends with the run's exit
code. With --config, --plugins or section.key=value, rank 0 of the scheduler runs `areal run` with them; where the run
folder is there already, it goes on with it. One process a machine is enough: further ranks of a node end at once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from areal_core.cli.request import Request, read_request
from areal_core.errors import UsageError

SUMMARY = "join this machine to a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the words of `areal node`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run, which all nodes see")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="for areal run on rank 0")
    parser.add_argument("--config", metavar="CONFIG", help="for areal run on rank 0: a YAML file or a preset")
    parser.add_argument("--plugins", action="append", default=[], metavar="A,B", help="for areal run on rank 0")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=600.0, help="seconds to wait for the run (600)"
    )


def execute(arguments: argparse.Namespace) -> int:
    """Be the node, or on rank 0 the run itself."""
    from areal_core.launchers.ranks import take_rank

    request = read_request(arguments)
    rank, run_dir = take_rank(), arguments.run_dir.resolve()
    _require_possible(run_dir)
    if any(request):
        if rank is None:
            raise UsageError(
                "no scheduler has said which rank this is: RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK and "
                "JOB_COMPLETION_INDEX are not set",
                hints=[
                    f"start the run: areal run ... launcher.type=external launcher.nodes=N run_dir={run_dir}",
                    f"and on each node: areal node {run_dir}",
                ],
            )
        if rank.rank == 0:
            return _run(run_dir, rank.nodes, request)
    from areal_core.driver.joining import join_run
    from areal_core.driver.terminal import log
    from areal_core.runs.folder import RunFolder

    if rank is not None and rank.local_rank:
        log(f"local rank {rank.local_rank}: the first process of this machine does its part, and this one ends")
        return 0
    return join_run(RunFolder(run_dir), patience_s=arguments.wait, log=log, is_started=any(request))


def _require_possible(run_dir: Path) -> None:
    """Raise `UsageError` where no run is and none can begin; a folder that is being made is empty at first."""
    if file := next((path for path in (run_dir, *run_dir.parents) if path.is_file()), None):
        raise UsageError(f"{file} is a file, and no run folder")
    if run_dir.is_dir() and not (run_dir / "attempts").exists() and any(run_dir.iterdir()):
        raise UsageError(f"{run_dir} is not a run folder, and contains other files", hints=["name another one"])


def _run(run_dir: Path, nodes: int | None, request: Request) -> int:
    """Run the driver, or go on with the run; this machine's own agent is a process beside it."""
    from areal_core.cli.commands import run
    from areal_core.driver.terminal import log
    from areal_core.runs.folder import RunFolder

    words = ["launcher.type=core/external"]
    words += [] if nodes is None else [f"launcher.nodes={nodes}"]
    if nodes is None and not any(word.startswith("launcher.nodes=") for word in request.overrides):
        raise UsageError("the scheduler does not say how many nodes there are", hints=["add: launcher.nodes=N"])
    goes_on = RunFolder(run_dir).last_attempt is not None
    if goes_on:
        log(f"{run_dir} is there already: the run goes on, with the config that it has")
    words += [*request.overrides, *([] if goes_on else [f"run_dir={run_dir}"])]
    agent = subprocess.Popen([sys.executable, "-m", "areal_core", "node", str(run_dir)], start_new_session=True)
    try:
        return run.execute(
            argparse.Namespace(
                config=None if goes_on else request.config,
                overrides=words,
                plugins=request.plugins,
                resume=run_dir if goes_on else None,
                dry_run=False,
                json=False,
                allow_changes=False,
            )
        )
    finally:
        agent.terminate()
        agent.wait()
