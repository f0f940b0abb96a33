"""The core's health checks of a machine. `areal doctor` asks each function in a process of its own."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from areal_core.plugins import Finding

_GIB: Final = 1 << 30
_LEAST_FREE_BYTES: Final = _GIB
"""Less free space than this is reported as a problem."""
_NETWORK_DISKS: Final = {
    "nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "glusterfs", "9p", "fuse.sshfs",
}  # fmt: skip
"""Types of file systems that several machines share."""


def check_torch() -> Finding:
    """Import PyTorch and multiply two matrices."""
    import torch

    torch.ones(8, 8) @ torch.ones(8, 8)
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    return Finding(True, f"{torch.__version__}, {build}")


def check_gpus() -> Finding:
    """Compare the GPUs of the NVIDIA driver with those that PyTorch finds."""
    import torch

    installed = len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if installed and not count:
        return Finding(
            False, f"the driver has {installed}, PyTorch sees none: install its build for CUDA, or a newer driver"
        )
    if not count:
        return Finding(True, "none: everything computes on the CPU")
    gpus = [torch.cuda.get_device_properties(number) for number in range(count)]
    return Finding(True, "; ".join(f"{gpu.name}, {gpu.total_memory / _GIB:.0f} GiB" for gpu in gpus))


def check_shared_memory() -> Finding:
    """Check the free space in /dev/shm. A Docker container has 64 MiB by default."""
    if not Path("/dev/shm").is_dir():
        return Finding(True, "there is none: weights are synced below the scratch folder")
    usage = shutil.disk_usage("/dev/shm")
    text = f"{usage.free / _GIB:.1f} of {usage.total / _GIB:.1f} GiB are free"
    if usage.free < _LEAST_FREE_BYTES:
        return Finding(False, f"{text}; give a container more (--shm-size), or set weight_sync.transport to disk")
    return Finding(True, text)


def check_disk() -> Finding:
    """Check the free space of the current folder, the default place of runs, and of the scratch folder."""
    free = {name: shutil.disk_usage(name).free for name in (str(Path.cwd()), tempfile.gettempdir())}
    text = ", ".join(f"{size / _GIB:.1f} GiB free in {name}" for name, size in free.items())
    return Finding(min(free.values()) >= _LEAST_FREE_BYTES, text)


def check_run_folder() -> Finding:
    """Sync and rename folders below the current folder as a run does, and name the type of its file system."""
    with tempfile.TemporaryDirectory(prefix=".areal-doctor-", dir=Path.cwd()) as name:
        fresh, taken = Path(name, "fresh"), Path(name, "taken")
        for folder in (fresh, taken):
            folder.mkdir()
            (folder / "file").write_text("x")
        descriptor = os.open(fresh, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        try:
            fresh.rename(taken)
            return Finding(False, f"{Path.cwd()}: a folder may take the place of another: two programs could own a run")
        except OSError:
            fresh.rename(Path(name, "free"))
    kind = _file_system(Path.cwd())
    reach = "every node sees it" if kind in _NETWORK_DISKS else "this machine alone sees it"
    return Finding(True, f"{Path.cwd()} is on {kind}: {reach}")


def _file_system(path: Path) -> str:
    """Return the type of the mount that a path lies on."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    above = [(len(mount[1]), mount[2]) for mount in mounts if path.resolve().is_relative_to(mount[1])]
    return max(above)[1]
