"""The core's own health checks: each function is asked by `areal doctor` in a process of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from areal_core.plugins import Finding

GIB: Final = 1 << 30
LITTLE_BYTES: Final = GIB
NETWORK: Final = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "9p", "fuse.sshfs"}


def check_torch() -> Finding:
    """Import it, and multiply two matrices."""
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return Finding(True, f"{torch.__version__}, {built}")


def check_gpus() -> Finding:
    """Those that the driver has against those that PyTorch sees."""
    import torch

    there = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if there and not seen:
        return Finding(
            False, f"the driver has {there}, PyTorch sees none: install its build for CUDA, or a newer driver"
        )
    if not seen:
        return Finding(True, "none: everything computes on the CPU")
    parts = [torch.cuda.get_device_properties(number) for number in range(seen)]
    return Finding(True, "; ".join(f"{part.name}, {part.total_memory / GIB:.0f} GiB" for part in parts))


def check_shared_memory() -> Finding:
    """Docker gives 64 MiB of it unless told otherwise."""
    if not Path("/dev/shm").is_dir():
        return Finding(True, "there is none: weights are synced below the scratch folder")
    room = shutil.disk_usage("/dev/shm")
    text = f"{room.free / GIB:.1f} of {room.total / GIB:.1f} GiB are free"
    if room.free < LITTLE_BYTES:
        return Finding(False, f"{text}; give a container more (--shm-size), or set weight_sync.transport to disk")
    return Finding(True, text)


def check_disk() -> Finding:
    """Of the current folder, where runs are by default, and of the scratch folder."""
    free = {name: shutil.disk_usage(name).free for name in (str(Path.cwd()), tempfile.gettempdir())}
    text = ", ".join(f"{size / GIB:.1f} GiB free in {name}" for name, size in free.items())
    return Finding(min(free.values()) >= LITTLE_BYTES, text)


def check_run_folder() -> Finding:
    """Do there what a run does, and say what kind of file system it is."""
    with tempfile.TemporaryDirectory(prefix=".areal-doctor-", dir=Path.cwd()) as name:
        fresh, taken = Path(name, "fresh"), Path(name, "taken")
        for folder in (fresh, taken):
            folder.mkdir()
            (folder / "file").write_text("x")
        folder_number = os.open(fresh, os.O_RDONLY)
        os.fsync(folder_number)
        os.close(folder_number)
        try:
            fresh.rename(taken)
            return Finding(False, f"{Path.cwd()}: a folder may take the place of another: two programs could own a run")
        except OSError:
            fresh.rename(Path(name, "free"))
    kind = _file_system(Path.cwd())
    where = "every node sees it" if kind in NETWORK else "this machine alone sees it"
    return Finding(True, f"{Path.cwd()} is on {kind}: {where}")


def _file_system(path: Path) -> str:
    """The type of the mount that a path lies on."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(words[1]), words[2]) for words in mounts if path.resolve().is_relative_to(words[1])]
    return max(above)[1]
