"""Imports the user's own rewards as a run does: in a process without the variables that are named like secrets.

The child of the preflight imports all components with its whole environment, as most processes of a run do. Reward
processes get the public part of it (`public_environment`). A file that reads a secret while it is imported fails there.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Final, NamedTuple

from areal_core.checks.findings import reported
from areal_core.checks.rewards import TRIAL_S
from areal_core.config import public_environment
from areal_core.interfaces.launcher import describe_exit

if TYPE_CHECKING:
    from areal_core.config import RunConfig

_REASON: Final = (
    "the processes that call rewards do not get variables that are named like secrets; if the reward needs one, name "
    "it in the config, in a setting of the reward: env:NAME"
)


class ImportingProcess(NamedTuple):
    """A process that imports rewards.

    Attributes:
        pid: of the process.
        output: file descriptor of a pipe, to which it writes its problems.
    """

    pid: int
    output: int


def start_importing_rewards(config: RunConfig, text: str) -> ImportingProcess | None:
    """Fork a process that imports the user's own rewards; None if a reward process would have the same variables.

    No other code of the user may be imported in this process yet: it would be imported for the rewards, too.

    Args:
        config: of the run.
        text: the config. Secrets that it names are not hidden.
    """
    public = public_environment(text)
    chosen = {f"rewards.{number}": reward for number, reward in enumerate(config.rewards) if reward.record is None}
    if not chosen or not os.environ.keys() - public.keys():
        return None
    output, ours = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        os.close(ours)
        return ImportingProcess(pid, output)
    problems: list[str] = []
    try:
        signal.alarm(TRIAL_S)
        os.environ.clear()
        os.environ.update(public)
        for key, reward in chosen.items():
            with reported(key, problems):
                reward.load()
        os.write(ours, json.dumps(problems).encode())
    finally:
        os._exit(0 if sys.exc_info()[0] is None else 1)


def import_problems(process: ImportingProcess | None) -> list[str]:
    """Wait until a process has imported the rewards. Return their problems."""
    if process is None:
        return []
    with os.fdopen(process.output, "rb") as pipe:
        written = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
    problems = json.loads(written) if written else [f"rewards: importing them {describe_exit(code)}"]
    return [f"{problem}: {_REASON}" for problem in problems]
