"""Settings of sandboxes, and of the reward by unit tests."""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Literal

from pydantic import ConfigDict, Field, field_validator

from areal_core.config import LocalPath, Seconds, Selection, Settings, component
from areal_core.errors import ConfigError
from areal_sandboxes.programs import PROGRAMS, find_program, installed_program

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.config import RunConfig

MEBIBYTE = 1 << 20


class LimitSettings(Settings):
    """Limits that every sandbox has."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    time_s: Seconds = Field(default=10.0, gt=0)
    """Time limit of a command in seconds. After it, everything in the sandbox is killed."""
    output_kib: int = Field(default=1024, gt=0, le=1 << 20)
    """Maximum output of a command in KiB, separately for standard output and standard error. A command that writes more
    is killed."""
    max_concurrency: int | None = Field(default=None, gt=0)
    """Maximum number of concurrent commands of one process. null: one for each core. Time in the queue does not count
    as the command's time."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Environment variables of a command, in addition to a few such as PATH and HOME. No others are inherited."""

    @field_validator("variables")
    @classmethod
    def _check_variables(cls, variables: dict[str, str]) -> dict[str, str]:
        invalid = [name for name, value in variables.items() if not re.fullmatch(r"\w+", name) or "\0" in value]
        if invalid:
            raise ValueError(f"{', '.join(map(repr, invalid))} cannot be an environment variable")
        return variables

    @property
    def slots(self) -> int:
        """Maximum number of concurrent commands of one process."""
        return self.max_concurrency or len(os.sched_getaffinity(0))

    @property
    def output_bytes(self) -> int:
        """Limit of each output of a command in bytes."""
        return self.output_kib * 1024

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the sandbox's programs are installed. Other nodes are not checked."""
        if config.launcher.target == "core/local":
            try:
                self.find_programs()
            except ConfigError as error:
                yield ": ".join((error.message, *error.hints))

    def find_programs(self) -> None:
        """Raise `ConfigError` if a program is not installed. Whether it works is known when the sandbox is created."""


class NoneSettings(LimitSettings):
    """Settings of a plain process without a sandbox."""

    def notes(self, config: RunConfig) -> Iterable[str]:
        """Warn that this isolates nothing."""
        del config
        yield "sandboxes/none isolates nothing: the model's code runs as your user; sandboxes/bubblewrap isolates it"


class BubblewrapSettings(LimitSettings):
    """Settings of a sandbox of Linux namespaces."""

    cpu_s: int = Field(default=10, gt=0)
    """CPU time limit in seconds of each process of a command."""
    memory_mib: int = Field(default=1024, ge=64)
    """Limit in MiB on the address space of each process. With a cgroup, also on the memory of all processes and files
    together."""
    processes: int = Field(default=64, ge=4)
    """Maximum number of processes and threads of a command at a time."""
    disk_mib: int = Field(default=64, gt=0)
    """Limit in MiB on all files that a command writes. They are kept in memory."""
    file_mib: int = Field(default=64, gt=0)
    """Limit in MiB on the size of one file that a command writes."""
    paths: list[LocalPath] = Field(default_factory=list)
    """Further paths of this machine that commands may read, such as a folder of data."""
    python: LocalPath | None = None
    """Interpreter that commands find as `python3`, with its libraries. null: the one that runs areal."""
    cgroup: Literal["where possible", "required", "never"] = "where possible"
    """Use of a cgroup, which limits the memory of all processes together. Without one, only the memory of each process
    is limited. `required`: refuse machines on which no cgroup can be made."""

    def find_programs(self) -> None:
        """See `LimitSettings.find_programs`."""
        for name in PROGRAMS:
            find_program(name)
        if self.python is not None and shutil.which(self.python) is None:
            raise ConfigError(
                f"python of the sandbox bubblewrap is {self.python}, which is not a program of this machine"
            )


class ContainerSettings(LimitSettings):
    """Settings of a sandbox that is a new container for each command."""

    image: str = "docker.io/library/python:3.12-slim"
    """Container image in which commands run. Pull it before the run: the run does not download it."""
    program: list[str] | None = Field(default=None, min_length=1)
    """Container program, docker or podman, with options of its own, such as [podman, --runtime, runc]. null: the one
    that is installed."""
    time_s: Seconds = Field(default=30.0, gt=0)
    """Time limit of a command in seconds, start of the container included. After it, the container is killed."""
    memory_mib: int = Field(default=1024, ge=64)
    """Limit in MiB on the memory of all processes of a command together, without swap."""
    processes: int = Field(default=64, ge=4)
    """Maximum number of processes and threads of a command at a time."""
    cores: float = Field(default=1.0, gt=0)
    """Maximum number of CPU cores that a command may use."""
    disk_mib: int = Field(default=64, gt=0)
    """Limit in MiB on all files that a command writes. They are kept in memory."""
    options: list[str] = Field(default_factory=list)
    """Further options for the `run` command, such as [--runtime=runsc]."""

    def find_programs(self) -> None:
        """See `LimitSettings.find_programs`."""
        installed_program(*(self.program or ())[:1])


class UnitTestsSettings(Settings):
    """Settings of a reward by unit tests."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    sandbox: Selection = component("sandboxes", default="sandboxes/bubblewrap")
    """Sandbox in which the code runs."""
    tests: str = "tests"
    """Key of the row that holds the tests: a text of asserts, a list of them, or a list of {input, output}."""
    share: bool = False
    """true: the reward is the share of tests that passed. false: it is 1 if all tests passed, else 0."""
    total_s: Seconds = Field(default=12.0, gt=0)
    """Time limit in seconds for all tests of an answer, time in the sandbox's queue included. Tests that have not
    passed by then have failed."""
    max_concurrency: int = Field(default=8, gt=0)
    """Maximum number of answers that one reward process tests concurrently."""
    file: str = "solution.py"
    """File name of the code in the sandbox."""
    command: list[str] = Field(default=["python3", "solution.py"], min_length=1)
    """Command that runs the program for {input, output} tests, such as [sh, -c, "g++ -o a solution.cpp && ./a"]."""

    def check(self, config: RunConfig) -> Iterable[str]:
        """Check that the tests time out before the reward worker does, which would count as a failure of the reward."""
        limit = config.rollout.reward_timeout_s
        if self.total_s >= limit:
            yield f"total_s is {self.total_s:g}: it must be less than rollout.reward_timeout_s, which is {limit:g}"
