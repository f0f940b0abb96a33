"""How much of the host's memory is left, for this machine and for the control groups that this process is in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Of control groups, version 2 and 1: files of limit and use in bytes, and what in `memory.stat` can be taken back."""


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that may still be taken before the machine, or a control group of this process, has no more to give.

    Args:
        root: below which `proc` and `sys` lie.
    """
    machine = _numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, min([machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]
    own = root / "proc/self/cgroup"
    names = [line.split(":", 2)[2].strip("/") for line in (own.read_text().splitlines() if own.is_file() else ())]
    for folder in {place for top in tops for name in names for place in (top / name, *(top / name).parents)}:
        for limit, used, reclaimable in LIMITS:
            path = folder / limit
            if path.is_file() and (text := path.read_text().strip()).isdigit():
                spare = _numbers(folder / "memory.stat").get(reclaimable, 0)
                yield int(text) - int((folder / used).read_text()) + spare


def _numbers(path: Path) -> dict[str, int]:
    """The second word of each line by its first one."""
    return {words[0]: int(words[1]) for line in path.read_text().splitlines() if len(words := line.split()) > 1}
