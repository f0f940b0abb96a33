"""Run `areal run` as a job of a Ray cluster, which goes on when this program, or this machine, is gone.

CONFIG, overrides and --plugins are those of `areal run`, in a folder that the cluster's nodes see as this machine does.
The config's launcher must be ray. What it needs of this environment (launcher.pass_environment) goes along.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.output import say
from areal_core.cli.request import Request, add_request_arguments, read_request
from areal_core.errors import RunError, UsageError
from areal_ray.config import INSTALL, RaySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

SUBMIT_S = 180.0
STOP_S = 600
"""For a run that is stopped (`ray job stop`) to write its checkpoint; Ray would kill it after 3 s."""
RAY = (sys.executable, "-m", "ray.scripts.scripts")


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal ray submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_request_arguments(parser)
    parser.add_argument("--resume", metavar="RUN_DIR", type=Path, help="go on with this run; its config applies")
    parser.add_argument(
        "--jobs-address",
        metavar="URL",
        help="where Ray takes jobs, such as http://HEAD:8265; by default RAY_API_SERVER_ADDRESS, else this machine",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return execute(parser.parse_intermixed_args(words))


def execute(arguments: argparse.Namespace) -> int:
    """Check the run, submit it, and say how it is followed."""
    request = read_request(arguments)
    folder, settings = _checked(request, arguments.resume)
    run = ["--resume", str(folder)] if arguments.resume else [request.config] if request.config else []
    run += [word for word in request.overrides if not word.startswith("run_dir=")]
    run += [] if arguments.resume else [f"run_dir={folder}"]
    run += ["--plugins", ",".join(request.plugins)] if request.plugins else []
    name = f"areal-{folder.name}-{secrets.token_hex(3)}"
    at = ["--address", arguments.jobs_address] if arguments.jobs_address else []
    own = settings.runtime_env.get("env_vars", {})
    variables = {key: value for key, value in settings.passed(os.environ).items() if key not in own}
    variables["RAY_JOB_STOP_WAIT_TIME_S"] = str(STOP_S)
    _submit(
        [*at, "--no-wait", "--submission-id", name, "--runtime-env-json", json.dumps({"env_vars": variables})],
        # `exec`: a shell would die of the signal that asks the run to stop, and Ray lose sight of the run.
        ["exec", "env", "-C", str(Path.cwd()), sys.executable, "-m", "areal_core", "run", *run],
    )
    where = f"{shlex.join(at)} " if at else ""
    say(
        f"submitted as {name}\n"
        f"  run folder   {folder}\n"
        f"  its output   ray job logs {where}--follow {name}\n"
        f"  its state    ray job status {where}{name}\n"
        f"  stop it      ray job stop {where}{name}\n"
        f"  go on later  areal ray submit --resume {folder}"
    )
    return 0


def _checked(request: Request, resume: Path | None) -> tuple[Path, RaySettings]:
    """The run's folder and its launcher's settings, where the job can be what is asked for."""
    from areal_core.config import load_run, resolve

    if resume is not None:
        if request.config is not None:
            raise UsageError(f"--resume takes the config from {resume}, so CONFIG cannot be named as well")
        resolved = load_run(resume, request.overrides, request.plugins)
    else:
        resolved = resolve(request.config, request.plugins, request.overrides)
    settings = resolved.config.launcher.settings
    if not isinstance(settings, RaySettings):
        raise UsageError(
            f"the launcher of this run is {resolved.config.launcher.target}: it would use one node of the cluster",
            hints=["add: launcher.type=ray"],
        )
    if settings.address is None:
        raise UsageError(
            "launcher.address is null: the run would start a cluster of its own inside of the one that runs it",
            hints=["add: launcher.address=auto"],
        )
    folder = resume or resolved.run_dir or Path("runs") / f"{resolved.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    if resume is None and folder.exists():
        raise UsageError(
            f"the run folder {folder} exists already",
            hints=[f"go on with it: areal ray submit --resume {folder}", "choose another: run_dir=PATH"],
        )
    return folder.resolve(), settings


def _submit(options: list[str], entrypoint: list[str]) -> None:
    """Hand the job to Ray.

    Raises:
        RunError: Ray does not take it.
    """
    try:
        done = subprocess.run(
            [*RAY, "job", "submit", *options, "--", *entrypoint],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SUBMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise RunError(f"Ray has not taken the job within {SUBMIT_S:g} s") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        hints = ["where Ray takes jobs is said by --jobs-address http://HEAD:8265", f"jobs need: {INSTALL}"]
        raise RunError("Ray does not take the job: " + "\n".join(said), hints=hints)
