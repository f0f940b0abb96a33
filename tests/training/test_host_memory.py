"""Memory that is available on a host: of the machine, and of control groups of either version."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.training.host_memory import available_memory

if TYPE_CHECKING:
    from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MACHINE = {"proc/meminfo": "MemTotal:       2000 kB\nMemAvailable:   1000 kB\nHugePages_Total:  0\n"}


def test_of_this_machine() -> None:
    assert 0 < available_memory() < 2**60


def test_of_the_machine_where_no_group_has_a_limit(tmp_path: Path) -> None:
    assert available_memory(write(tmp_path, MACHINE)) == 1000 * 1024
    unlimited = {"proc/self/cgroup": "0::/run\n", "sys/fs/cgroup/run/memory.max": "max\n"}
    assert available_memory(write(tmp_path, unlimited)) == 1000 * 1024


def test_of_the_tightest_group(tmp_path: Path) -> None:
    """The group is the process's own or one above it. Cached files that the kernel can drop count as free."""
    root = write(tmp_path, {
        **MACHINE,
        "proc/self/cgroup": "0::/job/run\n",
        "sys/fs/cgroup/job/run/memory.max": "800000\n",
        "sys/fs/cgroup/job/run/memory.current": "100000\n",
        "sys/fs/cgroup/job/run/memory.stat": "anon 90000\ninactive_file 5000\n",
        "sys/fs/cgroup/job/memory.max": "500000\n",
        "sys/fs/cgroup/job/memory.current": "400000\n",
        "sys/fs/cgroup/job/memory.stat": "anon 300000\ninactive_file 50000\n",
    })  # fmt: skip
    assert available_memory(root) == 150_000


def test_of_a_container_with_groups_of_version_1(tmp_path: Path) -> None:
    """A container sees its own limit at the top, under another name than the host."""
    root = write(tmp_path, {
        **MACHINE,
        "proc/self/cgroup": "5:cpu:/docker/0123\n4:memory:/docker/0123\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "300000\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "310000\n",
        "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 0\n",
    })  # fmt: skip
    assert available_memory(root) == 0
