"""Host memory that is still available, on the machine and in the control groups of this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of control groups, version 2 and 1, with the limit and the use in bytes; and the entry of `memory.stat` with
the bytes in use that the kernel can reclaim."""


def available_memory(root: Path = Path("/")) -> int:
    """Return the bytes that this process can still allocate before the machine, or a control group, is out of memory.

    Args:
        root: folder that holds `proc` and `sys`.
    """
    machine = _read_numbers(root / "proc/meminfo")["MemAvailable:"] * 1024
    return max(0, min([machine, *_available_in_groups(root)]))


def _available_in_groups(root: Path) -> Iterator[int]:
    tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/memory"]
    listing = root / "proc/self/cgroup"
    lines = listing.read_text().splitlines() if listing.is_file() else []
    groups = [top / line.split(":", 2)[2].strip("/") for top in tops for line in lines]
    for folder in {folder for group in groups for folder in (group, *group.parents)}:
        for limit, used, reclaimable in LIMITS:
            path = folder / limit
            text = path.read_text().strip() if path.is_file() else ""
            if text.isdigit():  # version 2 writes "max" if there is no limit
                spare = _read_numbers(folder / "memory.stat").get(reclaimable, 0)
                yield int(text) - int((folder / used).read_text()) + spare


def _read_numbers(path: Path) -> dict[str, int]:
    """Return the second word of each line by its first one."""
    lines = [line.split() for line in path.read_text().splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1}
