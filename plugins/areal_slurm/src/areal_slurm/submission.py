"""Train in a batch job of SLURM.

Checks the config, writes the run folder with everything that the run is made of, and submits a job that starts it on
the nodes of its allocation. Before its time limit, and when another job takes its place, the run writes a checkpoint,
the job is queued again, and the run goes on when it comes to its turn, until it is done.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import say
from areal_core.cli.request import Request, add_request_arguments, read_request, require_place
from areal_core.config import load_run, resolve
from areal_core.errors import ConfigError, RunError, UsageError
from areal_core.runs import RunFolder, execute, write_down
from areal_slurm.commands import slurm
from areal_slurm.config import SlurmSettings
from areal_slurm.requeue import VARIABLE
from areal_slurm.sizes import check_sizes, gpus_of, says_more

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.config import Resolved

SCRIPT_NAME, LOG_NAME = "slurm.sh", "slurm.log"
TASK_FOLDER = "task-"
PASSED_ON = ("nodes", "time", "partition", "account", "qos", "gres", "cpus-per-task", "mem", "exclude", "array")
"""Options of sbatch that have the same name here."""
SCRIPT = """\
#!/bin/bash
{directives}

# Starts the run, and goes on with it whenever the job is queued again.
trap '' USR1  # the warning before the time limit, until areal listens
{setup}export {variable}=1
exec {python} -m areal_core run --resume {folder}
"""


@dataclass
class Submission:
    """A job to be.

    Attributes:
        folder: of the run; of an array, the one that holds a folder for each run.
        runs: what each run is, by its folder.
        options: of sbatch.
        settings: of the launcher.
    """

    folder: Path
    runs: Mapping[Path, Resolved]
    settings: SlurmSettings
    options: Sequence[str] = field(default_factory=list)
    is_array: bool = False

    @property
    def script(self) -> str:
        """The batch script."""
        folder = shlex.quote(str(self.folder))
        setup = f"set -e\n{self.settings.setup}\nset +e\n" if self.settings.setup else ""
        return SCRIPT.format(
            directives="\n".join(f"#SBATCH {option}" for option in self.options),
            setup=setup,
            variable=VARIABLE,
            python=shlex.quote(sys.executable),
            folder=f"{folder}/{TASK_FOLDER}$SLURM_ARRAY_TASK_ID" if self.is_array else folder,
        )


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal slurm submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_request_arguments(parser)
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with this run in a new job")
    parser.add_argument("--nodes", metavar="N", default="1", help="of the allocation; by default 1")
    parser.add_argument("--time", metavar="TIME", help="limit of one turn of the job, as sbatch takes it: 4:00:00")
    parser.add_argument("--partition", metavar="NAME", help="to submit to")
    parser.add_argument("--account", metavar="NAME", help="that is charged")
    parser.add_argument("--qos", metavar="NAME", help="quality of service")
    parser.add_argument("--gres", metavar="LIST", help="what each node is to have: gpu:8")
    parser.add_argument("--cpus-per-task", metavar="N", help="cores of each node; or --sbatch=--exclusive for all")
    parser.add_argument("--mem", metavar="SIZE", help="memory of each node")
    parser.add_argument("--exclude", metavar="NODES", help="nodes that the job must not get")
    parser.add_argument("--array", metavar="LIST", help="a run for each number, which is its seed: 0-3, 1,5,7, 0-9%%2")
    parser.add_argument("--warn", metavar="S", type=int, default=180, help="seconds before the limit; by default 180")
    parser.add_argument(
        "--sbatch", metavar="OPTION", action="append", default=[], help="any other: --sbatch=--exclusive"
    )
    parser.add_argument("--dry-run", action="store_true", help="print the script, write and submit nothing")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return submit(parser.parse_intermixed_args(words))


def submit(arguments: argparse.Namespace) -> int:
    """Check what is asked, write it, submit it, and say how it is followed and stopped."""
    request = read_request(arguments)
    submission = _again(arguments, request) if arguments.resume else _new(arguments, request)
    if arguments.dry_run:
        say(submission.script)
        return 0
    for folder, resolved in list(submission.runs.items())[:1]:  # an array's differ in their seeds alone
        execute(resolved, run_dir=folder, resume=None, dry_run=True, allow_changed_plugins=False)
    script = submission.folder / SCRIPT_NAME
    try:
        for folder, resolved in submission.runs.items():
            write_down(resolved, RunFolder(folder))
        script.write_text(submission.script)
        job = slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]
    except RunError:
        if not arguments.resume:
            shutil.rmtree(submission.folder, ignore_errors=True)
        raise
    rows = {
        "job": job,
        "run folder": submission.folder,
        "script": script,
        "follow": f"squeue --jobs={job}; tail -F {submission.folder / submission_log(submission, '*')}",
        "stop in order": f"scancel --batch --signal=INT {job}",
        "stop at once": f"scancel {job}",
        "go on later": f"areal slurm submit --resume {next(iter(submission.runs), arguments.resume)}"
        f"{'' if arguments.nodes == '1' else f' --nodes {arguments.nodes}'}",
    }
    for label, text in rows.items():
        say(f"{label:<15}{text}")
    return 0


def submission_log(submission: Submission, task: str) -> str:
    """Where the job writes, below the folder."""
    return f"{TASK_FOLDER}{task}/{LOG_NAME}" if submission.is_array else LOG_NAME


def _new(arguments: argparse.Namespace, request: Request) -> Submission:
    """A job of a new run, or of several."""
    gpus = _gpus(arguments)
    resolved = _resolve(request, gpus)
    name = f"{resolved.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    folder = (resolved.run_dir or Path("runs") / name).resolve()
    require_place("the run folder", folder, "choose another: run_dir=PATH")
    if folder.exists():
        raise UsageError(
            f"the run folder {folder} exists already",
            hints=[f"go on with it: areal slurm submit --resume {folder}", "choose another: run_dir=PATH"],
        )
    runs = {folder: resolved}
    if arguments.array:
        numbers = task_numbers(arguments.array)
        runs = {folder / f"{TASK_FOLDER}{n}": _resolve(request, gpus, f"seed={n}") for n in numbers}
    return _submission(arguments, folder, runs, resolved)


def _again(arguments: argparse.Namespace, request: Request) -> Submission:
    """Another job of a run that there is."""
    if request.config or request.overrides or arguments.array:
        raise UsageError(
            "--resume goes on with the run as it is: CONFIG, section.key=value and --array have no meaning with it",
            hints=["leave them out"],
        )
    folder = arguments.resume.resolve()
    return _submission(arguments, folder, {}, load_run(folder))


def _resolve(request: Request, gpus: int | None, *more: str) -> Resolved:
    """The config with this plugin's launcher, whatever it says of another one; a placement is counted with the job's
    `gpus` of each node, where nobody has written how many they have."""
    chosen = [word for word in request.overrides if word.startswith(("launcher=", "launcher.type="))]
    words = [*([] if chosen else ["launcher=slurm/slurm"]), *request.overrides, *more]
    try:
        resolved = resolve(request.config, request.plugins, words)
        placement, counted = resolved.config.placement, resolved.config.launcher.keywords().get("gpus_per_node")
        if not gpus or counted or not (placement.training or placement.generation):
            return resolved
    except ConfigError as error:
        if not gpus or not any("set launcher.gpus_per_node" in hint for hint in error.hints):
            raise
    return resolve(request.config, request.plugins, [*words, f"launcher.gpus_per_node={gpus}"])


def _gpus(arguments: argparse.Namespace) -> int | None:
    """GPUs of each node of the job; None where the job does not say, or not for all nodes alike."""
    return None if says_more(arguments.sbatch) else gpus_of(arguments.gres)


def _submission(
    arguments: argparse.Namespace, folder: Path, runs: Mapping[Path, Resolved], resolved: Resolved
) -> Submission:
    settings = resolved.config.launcher.settings
    if not isinstance(settings, SlurmSettings):
        raise UsageError(
            f"the launcher of the run is {resolved.config.launcher.reference}, which knows nothing of the job's nodes",
            hints=["leave launcher.type out, or set launcher=slurm"],
        )
    if not says_more(arguments.sbatch):
        check_sizes(resolved.config, arguments.nodes, _gpus(arguments))
    submission = Submission(folder, runs, settings, is_array=bool(arguments.array))
    given = {option: getattr(arguments, option.replace("-", "_")) for option in PASSED_ON}
    submission.options = [
        f"--job-name={shlex.quote(resolved.name)}",
        *(f"--{option}={shlex.quote(value)}" for option, value in given.items() if value is not None),
        *("--ntasks-per-node=1", "--no-kill", "--requeue", "--open-mode=append", f"--signal=B:USR1@{arguments.warn}"),
        f"--output={shlex.quote(str(folder / submission_log(submission, '%a')))}",
        f"--chdir={shlex.quote(str(Path.cwd()))}",
        *arguments.sbatch,
    ]
    return submission


def task_numbers(expression: str) -> list[int]:
    """The numbers of a job array, as sbatch takes them: `0-3`, `1,5,7`, `0-8:2`, each with `%N` behind it.

    Raises:
        UsageError: it is no such list.
    """
    numbers: list[int] = []
    for part in expression.partition("%")[0].split(","):
        if not (match := re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)):
            raise UsageError(f"--array={expression} is no list of numbers", hints=["for four runs: --array=0-3"])
        first, last, step = (int(group) if group else None for group in match.groups())
        numbers += range(first or 0, (first or 0 if last is None else last) + 1, step or 1)
    return numbers
