"""Run `areal run` as a job of a Ray cluster, which goes on when this program, or this machine, is gone.

The words are those of `areal run`, in a folder that the cluster's nodes see as this machine does. The config's launcher
must be ray. What it needs of this environment (launcher.pass_environment) goes along.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.cli.commands import run
from areal_core.cli.output import say
from areal_core.cli.request import read_request
from areal_core.errors import RunError, UsageError
from areal_ray.config import INSTALL, RaySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP_S = 600
"""For a run that is stopped (`ray job stop`) to write its checkpoint; Ray would kill it after 3 s."""


def main(words: Sequence[str]) -> int:
    """Run the command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="areal ray submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run.add_arguments(parser)
    parser.add_argument(
        "--jobs-address",
        metavar="URL",
        help="where Ray takes jobs, such as http://HEAD:8265; by default RAY_API_SERVER_ADDRESS, else this machine",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return submit(parser.parse_intermixed_args(words))


def submit(arguments: argparse.Namespace) -> int:
    """Check the run as its dry run does, submit it, and say how it is followed."""
    from areal_core.config import load_run, resolve

    request, folder = read_request(arguments), arguments.resume and arguments.resume.resolve()
    resolved = (
        load_run(folder, request.overrides, request.plugins)
        if folder
        else resolve(request.config, request.plugins, request.overrides)
    )
    settings = resolved.config.launcher.settings
    if not isinstance(settings, RaySettings) or settings.address is None:
        told = "launcher.type=ray" if not isinstance(settings, RaySettings) else "launcher.address=auto"
        raise UsageError("the launcher of this run would not use the cluster that runs it", hints=[f"add: {told}"])
    is_dry, arguments.dry_run = arguments.dry_run, True
    if (code := run.execute(arguments)) or is_dry:
        return code
    line = [*(["--resume", str(folder)] if folder else [request.config] if request.config else []), *request.overrides]
    line += ["--plugins", ",".join(request.plugins)] if request.plugins else []
    line += ["--allow-changed-plugins"] if arguments.allow_changed_plugins else []
    # `exec`: a shell would die of the signal that asks the run to stop, and Ray lose sight of the run.
    line = ["exec", "env", "-C", str(Path.cwd()), sys.executable, "-m", "areal_core", "run", *line]
    own = settings.runtime_env.get("env_vars", {})
    variables = {name: value for name, value in settings.passed(os.environ).items() if name not in own}
    name = _hand_over(arguments.jobs_address, shlex.join(line), variables)
    job = f"{f'--address {shlex.quote(arguments.jobs_address)} ' if arguments.jobs_address else ''}{name}"
    say(f"submitted as {name}")
    for label, command in {"its output": "logs --follow", "its state": "status", "stop it": "stop"}.items():
        say(f"  {label:<12}ray job {command} {job}")
    return 0


def _hand_over(address: str | None, line: str, variables: dict[str, str]) -> str:
    """Hand a command line to Ray as a job; its name.

    Raises:
        RunError: Ray does not take it.
    """
    from ray.job_submission import JobSubmissionClient

    name, environment = f"areal-{secrets.token_hex(4)}", {**variables, "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_S)}
    try:
        client = JobSubmissionClient(address)
        return str(client.submit_job(entrypoint=line, submission_id=name, runtime_env={"env_vars": environment}))
    except (OSError, RuntimeError, ValueError) as error:
        hints = ["where Ray takes jobs is said by --jobs-address http://HEAD:8265", f"jobs need: {INSTALL}"]
        raise RunError(f"Ray does not take the job: {error}", hints=hints) from error
