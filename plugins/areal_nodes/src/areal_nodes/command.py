"""Join this machine to a run. torchrun, mpirun, Kubernetes, ssh or a shell may start the command.

The command waits for the run, starts what the driver places on this machine, and ends with the run's exit code.
With --config, --plugins or section.key=value, rank 0 of the scheduler also runs `areal run` with these arguments; if
the run folder exists, it resumes the run. One process for each machine is enough: further local ranks end immediately.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import UsageError
from areal_core.programs import add_run_arguments, execute_run, log, read_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.programs import Request, RunFolder

AGENT = ("-m", "areal_core", "nodes", "node")
"""Arguments of Python that start the agent of rank 0's own machine."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the arguments of `areal node`."""
    parser = argparse.ArgumentParser(
        prog="areal node", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder, which all machines must share")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="config values for areal run on rank 0"
    )
    parser.add_argument(
        "--config", metavar="CONFIG", help="config for areal run on rank 0: a YAML file, or a preset as PLUGIN/NAME"
    )
    parser.add_argument("--plugins", action="append", default=[], metavar="A,B", help="plugins for areal run on rank 0")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=float,
        default=600.0,
        help="seconds to wait for the run to begin (default: 600)",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def main(argv: Sequence[str]) -> int:
    """Serve the run on this machine, or drive it if this is rank 0; return the exit code.

    Raises:
        UsageError: RUN_DIR cannot be a run folder, or there are arguments for rank 0 and no scheduler has set a rank.
        RunError: the run has not begun in time, or has failed.
    """
    from areal_core.programs import RunFolder
    from areal_nodes.joining import join_run
    from areal_nodes.ranks import take_rank

    arguments = build_parser().parse_intermixed_args(argv)
    request = read_request(arguments)
    run_dir = arguments.run_dir.resolve()
    rank = take_rank()
    _require_run_folder(run_dir)
    is_scheduled = any(request)
    if is_scheduled and rank is None:
        raise UsageError(
            "no scheduler has set a rank: RANK, SLURM_PROCID, OMPI_COMM_WORLD_RANK, PMI_RANK and JOB_COMPLETION_INDEX "
            "are not in the environment",
            hints=[
                f"start the run: areal run ... launcher.type=external launcher.nodes=N run_dir={run_dir}",
                f"then run on each machine: areal node {run_dir}",
            ],
        )
    if rank is not None and is_scheduled and rank.rank == 0:
        return _drive(RunFolder(run_dir), rank.nodes, request)
    if rank is not None and rank.local_rank > 0:
        log(f"local rank {rank.local_rank} ends: local rank 0 serves this machine")
        return 0
    return join_run(RunFolder(run_dir), wait_s=arguments.wait, log=log, is_started=is_scheduled)


def _require_run_folder(path: Path) -> None:
    """Raise `UsageError` if a path is not a run folder and cannot become one. A new run folder is empty at first."""
    file = next((folder for folder in (path, *path.parents) if folder.is_file()), None)
    if file is not None:
        raise UsageError(f"{file} is a file, not a run folder", hints=["name another folder"])
    if path.is_dir() and not (path / "attempts").exists() and any(path.iterdir()):
        raise UsageError(f"{path} is not a run folder: it contains other files", hints=["name another folder"])


def _drive(run: RunFolder, nodes: int | None, request: Request) -> int:
    """Drive the run, or resume it if its folder exists. The agent of this machine is a child process."""
    overrides = ["launcher.type=nodes/external"]
    if nodes is not None:
        overrides.append(f"launcher.nodes={nodes}")
    elif not any(override.startswith("launcher.nodes=") for override in request.overrides):
        raise UsageError("the scheduler does not say how many nodes there are", hints=["add: launcher.nodes=N"])
    overrides += request.overrides
    parser = argparse.ArgumentParser()
    add_run_arguments(parser)
    arguments = [word for plugin in request.plugins for word in ("--plugins", plugin)]
    if run.last_attempt is not None:
        log(f"{run.path} exists: the driver resumes the run with its own config")
        arguments += [*overrides, "--resume", str(run.path)]
    else:
        arguments += [*([request.config] if request.config else []), *overrides, f"run_dir={run.path}"]
    agent = subprocess.Popen([sys.executable, *AGENT, str(run.path)], start_new_session=True)
    try:
        return execute_run(parser.parse_intermixed_args(arguments))
    finally:
        agent.terminate()
        agent.wait()
