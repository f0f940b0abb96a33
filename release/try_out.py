"""Install a release as users will: from a local index with nothing but its files, into empty environments.

    python release/try_out.py [dist] [--only NAME ...]

The index is pypiserver's, on loopback; of areal nothing but these files is admitted, and libraries of others come from
where pip finds them, in the versions of constraints.txt. Tried are the first two lines of a user, the demonstration to
its end, new plugins, and every distribution by itself. It takes half an hour on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("reward", "dataset", "workflow", "algorithm")
LEARNED = 0.9
"""What the demonstration's model gets right at its end; it begins at 0.17."""
MOST_HINTS = 2
"""`areal run --plugins grpo` beside the core alone: the plugin is missing, then those that its preset names."""


class TrialError(Exception):
    """A step of a user did not go as the documentation says."""


class Environment:
    """An empty virtual environment and an empty folder to work in; pip knows the local index and its constraints."""

    def __init__(self, folder: Path, index: str, constraints: Path) -> None:
        self.folder, self.work = folder, folder / "work"
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.work.mkdir()
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        self._variables = {
            "OMP_NUM_THREADS": "1",
            **kept,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "HOME": str(folder),
            "PIP_CONSTRAINT": f"{ROOT / 'constraints.txt'} {constraints}",
            "PIP_EXTRA_INDEX_URL": f"{index} {os.environ.get('PIP_EXTRA_INDEX_URL', '')}".strip(),
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }

    def run(self, line: str, code: int = 0, at: str = ".") -> str:
        """Run a line as a user types it; what it printed, errors only where one is expected.

        Raises:
            TrialError: its exit code is another one, or it takes longer than a quarter of an hour.
        """
        words, folder = shlex.split(line), self.work / at
        try:
            done = subprocess.run(
                words, cwd=folder, env=self._variables, capture_output=True, text=True, timeout=900, check=False
            )
        except subprocess.TimeoutExpired:
            raise TrialError(f"{line}: still running after a quarter of an hour") from None
        if done.returncode != code:
            raise TrialError(f"{line}: exit code {done.returncode} instead of {code}\n{done.stdout}\n{done.stderr}")
        return done.stderr if code else done.stdout


@contextmanager
def local_index(files: Path) -> Iterator[str]:
    """The address of an index that has the files of a folder."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = ["run", "-p", str(port), "-i", "127.0.0.1", "--disable-fallback", str(files)]
    with subprocess.Popen([sys.executable, "-m", "pypiserver", *words], stderr=subprocess.DEVNULL) as server:
        try:
            address = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + 30
            while True:
                try:
                    urlopen(address).close()
                    break
                except OSError:
                    if server.poll() is not None or time.monotonic() > deadline:
                        raise TrialError("pypiserver did not start: pip install pypiserver") from None
                    time.sleep(0.1)
            yield f"{address}/simple/"
        finally:
            server.terminate()


def two_lines(environment: Environment) -> str:
    """`pip install areal-core areal-sglang`, `areal run --plugins grpo`: each refusal names the line to go on with."""
    environment.run("pip install --quiet areal-core areal-sglang")
    environment.run("areal plugins sglang")
    lines: list[str] = []
    while len(lines) < MOST_HINTS:
        refused = environment.run("areal run --plugins grpo steps=3 run_dir=run", code=2)
        found = re.search(r"pip install areal-\S+(?: areal-\S+)*", refused)
        if not found or found[0] in lines:
            raise TrialError(f"the refusal names no line to go on with: {refused}")
        lines.append(found[0])
        environment.run(found[0].replace("install", "install --quiet"))
    environment.run("areal run --plugins grpo steps=3 run_dir=run")
    return f"went on with: {'; '.join(lines)}"


def demonstration(environment: Environment) -> str:
    """`pip install 'areal-core[demo]'` and a hundred steps."""
    environment.run("pip install --quiet areal-core[demo]")
    environment.run("areal run --plugins grpo run_dir=run")
    lines = [json.loads(line) for line in (environment.work / "run/metrics.jsonl").read_text().splitlines()]
    scores = [line["evaluation/reward"] for line in lines if "evaluation/reward" in line]
    if scores[-1] < LEARNED or not (environment.work / "run/report.html").is_file():
        raise TrialError(f"the held-out score ends at {scores[-1]}, or there is no report")
    return f"held-out score {scores[0]:.3f} -> {scores[-1]:.3f}"


def new_plugins(environment: Environment) -> str:
    """`areal new-plugin` of four kinds, with their tests, ruff and mypy."""
    environment.run("pip install --quiet areal-core[demo]")
    counts = []
    for kind in KINDS:
        environment.run(f"areal new-plugin my-{kind} --kind {kind}")
        folder = f"areal-my-{kind}"
        environment.run("pip install --quiet -e .[test]", at=folder)
        tested = environment.run("python -m pytest -q -p no:cacheprovider", at=folder)
        counts.append(f"{kind} {' '.join(re.findall('[0-9]+ passed', tested))}")
        for line in ("ruff check .", "ruff format --check .", "mypy"):
            environment.run(line, at=folder)
    return ", ".join(counts)


def alone(name: str) -> Callable[[Environment], str]:
    """A distribution by itself: it installs, is found, and needs nothing that is not there."""

    def tried(environment: Environment) -> str:
        environment.run(f"pip install --quiet {name}")
        plugin = name.removeprefix("areal-")
        if plugin == "core":
            return environment.run("areal --version").strip()
        if plugin == "testing":  # no plugin of areal, but one of pytest
            return re.search(r"areal-testing-\S+", environment.run("python -m pytest --co -q -VV"))[0]
        environment.run(f"areal plugins {plugin}")
        found = {one["check"]: one for one in json.loads(environment.run("areal doctor --json"))}
        return str(found[f"plugin {plugin}"]["found"])

    return tried


def main(argv: Sequence[str] | None = None) -> int:
    """Try everything, say what came of it; 1 if something did not work."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dist", type=Path, nargs="?", default=ROOT / "dist", help="the folder that build.py filled")
    parser.add_argument("--only", nargs="+", default=[], help="names of trials, as they are printed")
    arguments = parser.parse_args(argv)
    files = sorted(arguments.dist.glob("areal_*.whl"))
    versions = {path.name.split("-")[0].replace("_", "-"): path.name.split("-")[1] for path in files}
    if not versions:
        parser.error(f"no wheels in {arguments.dist}: python release/build.py makes them")
    trials: dict[str, Callable[[Environment], str]] = {
        "two-lines": two_lines,
        "demonstration": demonstration,
        "new-plugins": new_plugins,
        **{name: alone(name) for name in versions},
    }
    if unknown := set(arguments.only) - trials.keys():
        parser.error(f"no trial is called {', '.join(sorted(unknown))}; there are {', '.join(trials)}")
    all_work = True
    with local_index(arguments.dist) as index, tempfile.TemporaryDirectory(prefix="areal-trial-") as folder:
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in versions.items()))
        for name in [name for name in trials if not arguments.only or name in arguments.only]:
            began, place = time.monotonic(), Path(folder, name)
            try:
                works, said = True, trials[name](Environment(place, index, constraints))
            except (TrialError, OSError, LookupError, ValueError, subprocess.CalledProcessError) as error:
                works, said = False, f"{type(error).__name__}: {error}"
            shutil.rmtree(place, ignore_errors=True)
            all_work &= works
            seconds = time.monotonic() - began
            print(f"{'works' if works else 'WRONG'}  {name:20} {seconds:6.1f} s  {said}", flush=True)
    return 0 if all_work else 1


if __name__ == "__main__":
    sys.exit(main())
