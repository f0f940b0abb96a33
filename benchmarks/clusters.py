"""A command on a cluster of three virtual nodes of this machine: true SLURM or true Ray, as the tests have it.

    python benchmarks/clusters.py slurm|ray COMMAND...

On SLURM the command runs in an allocation (`salloc`), on Ray beside the head. Needs root. The programs that play the
nodes are in the variable CLUSTER_NODES, as `n1=PID n2=PID`: who kills one switches that node off.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[1]
SALLOC = ("salloc", "--quiet", "--nodes=3", "--gres=gpu:2", "--no-kill")


@contextmanager
def cluster(kind: str, folder: Path) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    """Start one; words before a command that runs on it, and the environment of that.

    Args:
        kind: `slurm` or `ray`.
        folder: for its files.
    """
    if kind == "ray":
        one = _load("tests/integration/conftest.py").RayCluster()
        before, begin, nodes = [], one.repair, one.nodes
    else:
        module = _load("plugins/areal_slurm/tests/conftest.py")
        if reason := module.why_no_slurm():
            raise SystemExit(reason)
        one = module.Cluster(folder)
        before, begin, nodes = [*SALLOC], one.start, one._daemons
    try:
        begin()
        cache = os.environ.get("AREAL_CACHE", str(Path.home() / ".cache" / "areal"))
        message = " ".join(f"{name}={process.pid}" for name, process in nodes.items())
        yield before, {**one.environment, "AREAL_CACHE": cache, "CLUSTER_NODES": message, "OMP_NUM_THREADS": "1"}
    finally:
        one.close()


def _load(path: str) -> Any:
    """The module in a file of this repository: the tests' clusters are not installed."""
    specification = importlib.util.spec_from_file_location(Path(path).stem + "_cluster", ROOT / path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def main(kind: str, *command: str) -> int:
    """Run the command; its exit code."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as folder, cluster(kind, Path(folder)) as (before, environment):
        return subprocess.run([*before, *command], env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
