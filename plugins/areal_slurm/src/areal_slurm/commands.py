"""SLURM's own commands, which is how areal speaks with it: each has a deadline, and says what it refused."""

from __future__ import annotations

import subprocess

from areal_core.errors import RunError

TIMEOUT_S = 60.0
"""A controller that is busy or fails over to another one answers late."""


def slurm(program: str, *words: str) -> str:
    """What a command answers.

    Raises:
        RunError: it is not there, refuses, or does not answer in time.
    """
    try:
        done = subprocess.run(
            [program, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise RunError(
            f"there is no {program} on this machine", hints=["run this where SLURM's commands are, in its PATH"]
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(
            f"{program} {' '.join(words)}: no answer within {TIMEOUT_S:g} s", hints=["ask SLURM: scontrol ping"]
        ) from None
    if done.returncode:
        raise RunError(f"{program} {' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
