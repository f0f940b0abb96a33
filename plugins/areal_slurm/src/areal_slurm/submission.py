"""Train in a batch job of SLURM.

The command checks the config, writes the run folder, and submits a job that starts the run on the nodes of its
allocation. Before the time limit, or when the job is preempted, the run writes a checkpoint and the job is queued
again. The run resumes when the job starts again, until it is done.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.config import Resolved, load_run, resolve
from areal_core.errors import RunError, UsageError
from areal_core.programs import (
    Request,
    RunFolder,
    add_request_arguments,
    execute,
    model_folders,
    print_error,
    print_out,
    read_request,
    require_place,
    write_run_folder,
)
from areal_slurm.allocation import slurm
from areal_slurm.config import SlurmSettings
from areal_slurm.requeue import VARIABLE
from areal_slurm.sizes import check_sizes, unused_note

if TYPE_CHECKING:
    from collections.abc import Sequence

Job = tuple[Path, Mapping[Path, Resolved], Resolved]
"""Folder of the run, or of an array the folder that holds one for each run; the configs of new runs by their folders;
and the config that all have in common."""
SCRIPT_NAME, LOG_NAME = "slurm.sh", "slurm.log"
TASK_FOLDER = "task-"
PASSED_ON = ("nodes", "time", "partition", "account", "qos", "gres", "cpus-per-task", "mem", "exclude", "array")
"""Options that are passed on to sbatch under the same name."""
SCRIPT = """\
#!/bin/bash
{directives}

# If the first node returns before SLURM has given it up, SLURM starts the job again. If the node is lost for good, the
# job is kept without this script until the time limit (--no-kill). So the second node watches it and requeues the job.
LOST='until scontrol show node -o "$0" | grep -q State=DOWN; do sleep 20; done; exec scontrol requeue "$1"'
JOB=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
[ "${{SLURM_JOB_NUM_NODES:-1}}" = 1 ] || srun --job-name=watch --overlap --no-kill --nodes=1 --ntasks=1 --relative=1 \
    --mem=0 --gres=none --input=none bash -c "$LOST" "$SLURMD_NODENAME" "${{JOB:-$SLURM_JOB_ID}}" &> /dev/null &

# Start the run, or resume it whenever the job is requeued.
trap '' USR1  # the warning before the time limit, until areal listens
{setup}export {variable}=1
exec {python} -m areal_core run --resume {folder}
"""


def main(argv: Sequence[str]) -> int:
    """Run `areal slurm submit` with these arguments and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal slurm submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_request_arguments(parser)
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="resume the run in this folder in a new job")
    for option in PASSED_ON:
        details = (
            "; one run for each number, with that number as its seed: 0-3, 1,5,7, 0-9%%2" if option == "array" else ""
        )
        parser.add_argument(f"--{option}", metavar="VALUE", help=f"passed on to sbatch{details}")
    parser.set_defaults(nodes="1")
    parser.add_argument(
        "--warn",
        metavar="S",
        type=int,
        default=180,
        help="seconds before the time limit at which the run writes a checkpoint (default: 180)",
    )
    parser.add_argument(
        "--sbatch",
        metavar="OPTION",
        action="append",
        default=[],
        help="further option for sbatch, such as --sbatch=--exclusive; repeat it for more",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the job script, but write and submit nothing")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return submit(parser.parse_intermixed_args(argv))


def submit(arguments: argparse.Namespace) -> int:
    """Check the arguments, write the run folder and the script, submit the job, and print how to follow and stop it."""
    request = read_request(arguments)
    folder, runs, resolved = _resumed(arguments, request) if arguments.resume else _new(arguments, request)
    text = _script(arguments, folder, resolved)
    if arguments.dry_run:
        print_out(text)
        return 0
    for run, config in list(runs.items())[:1]:  # the runs of an array differ only in their seeds
        execute(config, run_dir=run, dry_run=True)
        model_folders(config)  # download from the hub here: the job's nodes often cannot reach it
    script = folder / SCRIPT_NAME
    try:
        for run, config in runs.items():
            write_run_folder(config, RunFolder(run))
        script.write_text(text)
        job = slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except RunError:
        if not arguments.resume:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    nodes = "" if arguments.nodes == "1" else f" --nodes {arguments.nodes}"
    rows = {
        "job": job,
        "run folder": folder,
        "follow": f"squeue --jobs={job}; tail -F {_log(arguments, '*', folder)}",
        "stop gracefully": f"scancel --batch --signal=INT {job}",
        "stop now": f"scancel {job}",
        "resume later": f"areal slurm submit --resume {next(iter(runs), folder)}{nodes}",
    }
    for label, value in rows.items():
        print_out(f"{label:<17}{value}")
    return 0


def _log(arguments: argparse.Namespace, task: str, folder: Path) -> Path:
    """Return the path of the job's log."""
    return folder / (f"{TASK_FOLDER}{task}" if arguments.array else "") / LOG_NAME


def _new(arguments: argparse.Namespace, request: Request) -> Job:
    """Prepare a job of a new run, or of an array of runs."""
    resolved = _resolve(request)
    name = f"{resolved.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    folder = (resolved.run_dir or Path("runs") / name).resolve()
    require_place("the run folder", folder, "choose another: run_dir=PATH")
    if folder.exists():
        hints = [f"resume it: areal slurm submit --resume {folder}", "choose another: run_dir=PATH"]
        raise UsageError(f"the run folder {folder} exists already", hints=hints)
    runs = {folder: resolved}
    if arguments.array:
        numbers = task_numbers(arguments.array)
        runs = {folder / f"{TASK_FOLDER}{n}": _resolve(request, f"seed={n}") for n in numbers}
    return folder, runs, resolved


def _resumed(arguments: argparse.Namespace, request: Request) -> Job:
    """Prepare another job of an existing run."""
    if request.config or request.overrides or arguments.array:
        hints = ["remove CONFIG, section.key=value and --array"]
        raise UsageError("--resume resumes the run with its own config", hints=hints)
    folder = arguments.resume.resolve()
    return folder, {}, load_run(folder)


def _resolve(request: Request, *further: str) -> Resolved:
    """Return the config. Without a launcher on the command line it gets this plugin's launcher."""
    is_chosen = any(override.startswith(("launcher=", "launcher.type=")) for override in request.overrides)
    overrides = [*([] if is_chosen else ["launcher=slurm/slurm"]), *request.overrides, *further]
    return resolve(request.config, request.plugins, overrides)


def _script(arguments: argparse.Namespace, folder: Path, resolved: Resolved) -> str:
    """Return the batch script."""
    settings = resolved.config.launcher.settings
    if not isinstance(settings, SlurmSettings):
        message = (
            f"the launcher of the run is {resolved.config.launcher.reference}, which does not use the nodes of a job"
        )
        raise UsageError(message, hints=["remove launcher.type, or set launcher=slurm"])
    check_sizes(resolved.config, arguments.nodes, arguments.gres, arguments.sbatch)
    if note := unused_note(resolved.config, arguments.gres):
        print_error(note)
    values = {option: getattr(arguments, option.replace("-", "_")) for option in PASSED_ON}
    options = [
        f"--job-name={shlex.quote(resolved.name)}",
        *(f"--{option}={shlex.quote(value)}" for option, value in values.items() if value is not None),
        *("--ntasks-per-node=1", "--no-kill", "--requeue", "--open-mode=append", f"--signal=B:USR1@{arguments.warn}"),
        f"--output={shlex.quote(str(_log(arguments, '%a', folder)))}",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        *arguments.sbatch,
    ]
    return SCRIPT.format(
        directives="\n".join(f"#SBATCH {option}" for option in options),
        setup=f"set -e\n{settings.setup}\nset +e\n" if settings.setup else "",
        variable=VARIABLE,
        python=shlex.quote(sys.executable),
        folder=shlex.quote(str(folder)) + (f"/{TASK_FOLDER}$SLURM_ARRAY_TASK_ID" if arguments.array else ""),
    )


def task_numbers(expression: str) -> list[int]:
    """Return the task numbers of a job array, in sbatch's notation: `0-3`, `1,5,7`, `0-8:2`, each optionally with `%N`.

    Raises:
        UsageError: the notation is invalid.
    """
    numbers: list[int] = []
    for part in expression.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is None:
            raise UsageError(f"--array={expression} is not a list of numbers", hints=["for four runs: --array=0-3"])
        first, last, step = (int(group or 0) for group in match.groups())
        numbers += range(first, max(first, last) + 1, step or 1)
    return numbers
