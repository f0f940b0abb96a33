"""Run `areal run` as a job of a Ray cluster. The job continues when this program ends or this machine is switched off.

The arguments are those of `areal run`. Start the command in a folder that the cluster's nodes share with this machine.
The config's launcher must be ray. The variables in launcher.pass_environment are passed on to the job. Set
RAY_API_SERVER_ADDRESS to the address for jobs, such as http://HEAD:8265; the default is this machine.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError, UsageError
from areal_core.programs import add_run_arguments, execute_run, print_out, read_request
from areal_ray.config import INSTALL, RaySettings

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP_S = "600"
"""Seconds that a run may take to write its checkpoint after `ray job stop`. Ray's default is 3."""


def main(argv: Sequence[str]) -> int:
    """Check the run like its dry run, submit it, and print the commands to follow and stop it. Return the exit code.

    Raises:
        UsageError: the run would not use the cluster.
        RunError: Ray refuses the job.
    """
    from areal_core.config import load_run, resolve

    parser = argparse.ArgumentParser(
        prog="areal ray submit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_run_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    arguments = parser.parse_intermixed_args(argv)
    (config, overrides, plugins), folder = read_request(arguments), arguments.resume
    resolved = load_run(folder, overrides, plugins) if folder else resolve(config, plugins, overrides)
    settings = resolved.config.launcher.settings
    if not isinstance(settings, RaySettings) or settings.address is None:
        hints = ["add: launcher.type=ray launcher.address=auto"]
        raise UsageError("the launcher of this run would not use the cluster that runs it", hints=hints)
    is_dry = arguments.dry_run
    arguments.dry_run = True
    code = execute_run(arguments)
    if code or is_dry:
        return code
    # `exec`: a shell would die of the signal that asks the run to stop, and Ray would lose track of the run.
    line = ["exec", "env", "-C", str(Path.cwd()), sys.executable, "-m", "areal_core", "run", *argv]
    inherited = settings.passed(os.environ)
    set_by_config = settings.runtime_env.get("env_vars", {})  # Ray accepts each name only once
    variables = {name: inherited[name] for name in inherited.keys() - set_by_config.keys()} | {
        "RAY_JOB_STOP_WAIT_TIME_S": STOP_S
    }
    from ray.job_submission import JobSubmissionClient

    try:
        job = JobSubmissionClient().submit_job(entrypoint=shlex.join(line), runtime_env={"env_vars": variables})
    except (OSError, RuntimeError, ValueError) as error:
        hints = ["set Ray's address for jobs: RAY_API_SERVER_ADDRESS=http://HEAD:8265", f"jobs need: {INSTALL}"]
        raise RunError(f"Ray refuses the job: {error}", hints=hints) from error
    print_out(f"submitted as {job}\n  ray job logs --follow {job}\n  ray job status {job}\n  ray job stop {job}")
    return 0
