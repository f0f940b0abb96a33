"""Bubblewrap against programs that mean harm, and what it says where it cannot work."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import time
from contextlib import suppress
from pathlib import Path

import pytest

from areal_core.errors import ConfigError
from areal_sandboxes.cgroups import Cgroups
from areal_sandboxes.config import BubblewrapSettings
from areal_sandboxes.health import check_bubblewrap

ROOT = Path(__file__).parents[3]
SMALL = {"memory_mib": 256, "processes": 24, "disk_mib": 64, "cpu_s": 3, "time_s": 4.0}


def _conftest():
    specification = importlib.util.spec_from_file_location("programs", Path(__file__).with_name("conftest.py"))
    assert specification is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["programs"] = module
    specification.loader.exec_module(module)
    return module


programs = _conftest()
CGROUPS = ["where possible", "never"]


@pytest.mark.slow
@pytest.mark.parametrize("cgroup", CGROUPS)
@pytest.mark.parametrize("program", programs.PROGRAMS, ids=lambda program: program.name)
def test_a_program_that_means_harm(program, cgroup, bubblewrap, tmp_path, port, monkeypatch):
    monkeypatch.setenv("SECRET", programs.SECRET)
    (tmp_path / "config.yaml").write_text(programs.SECRET)
    patient = {} if {"cpu", "time"} & {*program.limits} else {"cpu_s": 60, "time_s": 120.0}
    sandbox, marker = bubblewrap(**SMALL | patient, cgroup=cgroup), secrets.token_hex(16)
    words = programs.words_of(program, marker, tmp_path / "config.yaml", port)
    result = asyncio.run(sandbox.run(words))
    assert "ESCAPED" not in result.output, result.output
    assert programs.SECRET not in result.output
    assert result.limit in program.limits, result
    assert programs.left(marker) == []


def test_the_kernel_ends_what_takes_more_memory_than_all_may_have(bubblewrap):
    if Cgroups.find() is None:
        pytest.skip("cannot make a cgroup here")
    sandbox = bubblewrap(memory_mib=128, cgroup="required")
    code = (
        "import os, time\n"
        "for _ in range(4):\n"
        "  if os.fork() == 0: held = b'x' * (64 << 20); time.sleep(2); os._exit(0)\n"
        "print(sum(os.wait()[1] == 9 for _ in range(4)))"
    )
    result = asyncio.run(sandbox.run(["python3", "-c", code]))
    assert result.limit == "memory", result
    assert int(result.output or 4) >= 2, "each was within its own limit, and all together were not"


def test_groups_are_removed(bubblewrap):
    found = Cgroups.find()
    if found is None:
        pytest.skip("cannot make a cgroup here")
    sandbox = bubblewrap(cgroup="required", time_s=1)
    asyncio.run(sandbox.run(["sleep", "60"]))
    assert list(found.memory.glob(f"areal-{os.getpid()}-*")) == []
    assert list(found.processes.glob(f"areal-{os.getpid()}-*")) == []
    left = found.memory / "areal-999999999-0"
    left.mkdir()
    Cgroups.find()
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.parametrize("cgroup", CGROUPS)
@pytest.mark.parametrize("processes", range(2, 7))
def test_it_dies_with_its_owner(processes, cgroup, bubblewrap):
    """Also with one that is killed, and that can end nothing any more, however far it has come."""
    bubblewrap()
    marker, begun = secrets.token_hex(16), 5 if os.geteuid() == 0 else 4
    code = (
        "import asyncio, sys\nfrom areal_sandboxes.bubblewrap import Bubblewrap\n"
        "from areal_sandboxes.config import BubblewrapSettings\n"
        "command = ['sh', '-c', 'setsid sleep 600 & sleep 600', sys.argv[1]]\n"
        "asyncio.run(Bubblewrap(BubblewrapSettings(time_s=600, cgroup=sys.argv[2])).run(command))"
    )
    deadline = time.monotonic() + 120
    with subprocess.Popen([sys.executable, "-c", code, marker, cgroup]) as owner:
        while len(programs.left(marker)) < min(processes, begun):  # the owner is one
            assert owner.poll() is None
            assert time.monotonic() < deadline, f"the command does not begin: {programs.left(marker)}"
        if processes > begun:
            time.sleep(0.5)
        owner.kill()
    while left := {pid: name for pid in programs.left(marker) if (name := _name(pid))}:
        if processes <= begun and set(left.values()) == {"bwrap"}:
            # One that waits for a word of another one that was killed; a run's keeper ends it.
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.5)


def _name(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()


def test_shorter_times_are_kept_and_longer_ones_are_not(bubblewrap):
    sandbox = bubblewrap(time_s=1)
    for timeout_s in (0.5, 100):
        assert asyncio.run(sandbox.run(["sleep", "60"], timeout_s=timeout_s)).limit == "time"


def test_further_paths_are_shown_to_be_read(bubblewrap, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "text").write_text("known")
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    sandbox = bubblewrap(paths=[tmp_path / "data"])
    text = tmp_path / "data" / "text"
    assert asyncio.run(sandbox.run(["cat", str(text)])).output == "known"
    assert asyncio.run(sandbox.run(["sh", "-c", f"echo x > {text}"])).exit_code != 0
    assert text.read_text() == "known"
    with pytest.raises(ConfigError, match="paths of the sandbox bubblewrap do not exist"):
        bubblewrap(paths=[tmp_path / "nothing"])


def test_variables_and_another_python(bubblewrap):
    sandbox = bubblewrap(variables={"COLOR": "blue"}, python="/usr/bin/python3")
    code = "import os, sys; print(os.environ['COLOR'], sys.prefix)"
    assert asyncio.run(sandbox.run(["python3", "-c", code])).output == "blue /usr\n"
    with pytest.raises(ConfigError, match="which cannot be run"):
        bubblewrap(python="/usr/bin/no-python")


def test_the_libraries_of_this_interpreter_are_there(bubblewrap):
    code = "import sys, numpy; print(sys.prefix, numpy.zeros(3).sum())"
    assert asyncio.run(bubblewrap().run(["python3", "-c", code])).output == f"{sys.prefix} 0.0\n"


def test_no_more_run_at_a_time_than_may(bubblewrap):
    sandbox = bubblewrap(max_concurrency=2, time_s=30)

    async def work():
        most = 0
        runs = asyncio.gather(*(sandbox.run(["sleep", "0.3"]) for _ in range(6)))
        while not runs.done():
            most = max(most, 2 - sandbox._slots._value)
            await asyncio.sleep(0.02)
        return most, await runs

    most, results = asyncio.run(work())
    assert most == 2
    assert [result.exit_code for result in results] == [0] * 6


def test_too_many_files_and_too_large_ones_are_refused(bubblewrap):
    sandbox = bubblewrap(disk_mib=1)
    for files in ({"a": "x" * (2 << 20)}, {str(number): "" for number in range(300)}):
        with pytest.raises(ValueError, match=r"too many; a command may have 256|sandbox holds"):
            asyncio.run(sandbox.run(["true"], files=files))
    for words in ([], ["a\0b"], "true", ["x" * (1 << 18)]):
        with pytest.raises(ValueError, match=r"a command must be a list|cannot pass this argument"):
            asyncio.run(sandbox.run(words))


def test_where_it_is_not_installed(monkeypatch, tmp_path):
    from areal_sandboxes.bubblewrap import Bubblewrap
    from areal_sandboxes.programs import find_program

    find_program.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs the program bwrap, which is not installed") as caught:
        Bubblewrap(BubblewrapSettings())
    assert "apt-get install bubblewrap" in str(caught.value)
    finding = check_bubblewrap()
    assert finding.is_well, "a machine without it is well, as long as no config names it"
    assert finding.text.startswith("not usable here, and needed only if a config names sandboxes/bubblewrap")
    assert "apt-get install bubblewrap" in finding.text


@pytest.fixture
def somebody():
    """Words and environment by which a Python with these libraries runs as no root; skips where there is none."""
    paths = [str(ROOT), *map(str, (ROOT / "plugins").glob("*/src")), sysconfig.get_path("purelib")]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(paths), "OMP_NUM_THREADS": "1"}
    words = [sys.executable]
    if os.geteuid() == 0:
        words = ["setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "/usr/bin/python3"]
    done = subprocess.run([*words, "-c", "import pydantic, pytest"], env=environment, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("no interpreter of this machine has these libraries for a user that is not root")
    return words, environment


def test_where_namespaces_are_not_allowed(bubblewrap, somebody):
    """In a namespace in which no further one may be made."""
    bubblewrap()
    code = (
        "from areal_sandboxes.health import check_bubblewrap\n"
        "print(*check_bubblewrap())\n"
        "open('/proc/sys/user/max_user_namespaces', 'w').write('0')\n"
        "print(*check_bubblewrap())"
    )
    words, environment = somebody
    command = [*words[:-1], "unshare", "--user", "--map-root-user", words[-1], "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    first, second = done.stdout.splitlines()
    assert first.startswith("True works; memory"), done
    assert "the sandbox bubblewrap does not work on this machine" in second, done
    assert "user.max_user_namespaces" in second


@pytest.mark.slow
def test_the_suite_holds_without_root(bubblewrap, somebody):
    if os.geteuid() != 0:
        pytest.skip("all tests ran without root")
    bubblewrap()
    words, environment = somebody
    here = Path(__file__).with_name("test_conformance.py")
    chosen = ["-k", "TestBubblewrapWithoutACgroup", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "addopts="]
    command = [*words, "-m", "pytest", "--import-mode=importlib", "-rs", *chosen, str(here)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "19 passed" in done.stdout, done.stdout[-3000:]


def test_the_health_check_says_what_is_limited(bubblewrap):
    bubblewrap()
    assert check_bubblewrap().is_well
    assert "works" in check_bubblewrap().text


def test_what_is_required_and_not_there(bubblewrap, monkeypatch, tmp_path):
    from areal_sandboxes import cgroups

    monkeypatch.setattr(cgroups, "MOUNTS", tmp_path / "mounts")
    (tmp_path / "mounts").write_text("")
    with pytest.raises(ConfigError, match="cannot make a cgroup here"):
        bubblewrap(cgroup="required")
    assert "no cgroup" in bubblewrap().description


def test_folders_keep_what_a_command_writes_and_nothing_else_can_be_written(bubblewrap, tmp_path):
    sandbox = bubblewrap()
    folders = {"/app": tmp_path / "app", "/logs": tmp_path / "logs"}
    for folder in folders.values():
        folder.mkdir()
    (folders["/app"] / "given").write_text("1")
    first = "cat /app/given; echo 2 > /app/given; mkdir /app/new; touch /logs/a; touch /b /usr/b; ls /"
    begun = asyncio.run(sandbox.run_in(folders, ["bash", "-c", first]))
    assert begun.output.split()[0].startswith("1")
    assert begun.error.count("Read-only file system") == 2
    assert str(tmp_path) not in begun.output
    ended = asyncio.run(sandbox.run_in(folders, ["bash", "-c", "cat /app/given; ls -d /app/new /logs/a"]))
    assert ended.output.split() == ["2", "/app/new", "/logs/a"]
    alone = asyncio.run(sandbox.run(["ls", "/"]))
    assert "app" not in alone.output.split()


@pytest.mark.parametrize("name", ["/tmp", "/usr", "/etc", "/app/part", "app", "/../etc", "/"])
def test_a_folder_cannot_take_the_place_of_the_systems(bubblewrap, tmp_path, name):
    with pytest.raises(ValueError, match="a folder in a sandbox must be called"):
        asyncio.run(bubblewrap().run_in({name: tmp_path}, ["true"]))
    with pytest.raises(ValueError, match="there is no folder"):
        asyncio.run(bubblewrap().run_in({"/app": tmp_path / "no"}, ["true"]))
