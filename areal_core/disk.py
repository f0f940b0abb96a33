"""Files that survive a power cut, errors that name the full disk, and the names and shapes of a model's weights."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


PATIENCE_S = 60.0
"""Seconds for which a refused write is retried. The user may be freeing space, or another program may end."""
RETRY_INTERVAL_S = 0.25
"""Seconds between two tries."""
READERS = 8
"""Files that are read concurrently for their digests. A network disk is slow for a single reader."""
CHUNK_BYTES = 1 << 22
"""Bytes that are read from a file at a time."""
WEIGHTS_INDEX = "model.safetensors.index.json"
"""Name of the file that maps each tensor of a model to its file."""
_STATES = ("new", "former")
"""Suffixes of the hidden folders beside a folder that is being replaced."""
FULL_BYTES = 1 << 20
"""Free bytes below which a failed write is reported as a full disk."""


class DiskError(RunError):
    """The disk refuses a write: it is full, read-only, or belongs to another user. A retry may succeed."""


def is_in_memory(folder: Path) -> bool:
    """Return whether a folder is on a tmpfs. False if the kernel does not list its mounts."""
    place, kind = "", ""
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            point, file_system = (word.replace("\\040", " ") for word in line.split(" ")[1:3])
            if len(point) >= len(place) and folder.is_relative_to(point):
                place, kind = point, file_system
    return kind == "tmpfs"


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn the errors of failed writes in the block into `DiskError`.

    Args:
        what: name of what is written, for the message, such as "the ledger".
        path: file or folder that is written.

    Raises:
        DiskError: the disk refuses. The message has the cause, and the hints have the free space.
    """
    try:
        yield
    except RunError:  # it has a message of areal already
        raise
    except Exception as error:
        is_full = _is_full(error, path)
        if is_full or isinstance(error, OSError):
            reason = "the disk is full" if is_full else str(getattr(error, "strerror", None) or error)
            raise refused(what, path, reason, is_full=is_full) from error
        raise


def _is_full(error: Exception, path: Path) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # PyTorch and safetensors raise errors of their own for a full disk ("iostream error", "unexpected pos 704").
    return free_bytes(path) < FULL_BYTES


def free_bytes(path: Path) -> int:
    """Return the free bytes on the disk of a folder. The folder need not exist yet."""
    return shutil.disk_usage(_nearest(path)).free


def _nearest(path: Path) -> Path:
    """Return the folder itself, or its nearest parent that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def in_mebibytes(size: int) -> str:
    """Format a number of bytes in KiB or MiB."""
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


def refused(what: str, path: Path, reason: str, *, is_full: bool) -> DiskError:
    """Return the error of a refused write.

    Args:
        what: name of what is written.
        path: file or folder that is written.
        reason: why the disk refuses.
        is_full: whether free space would help. Then the hints have the space, else they point to the reason.
    """
    if not is_full:
        return DiskError(
            f"{what} cannot be written to {path}: {reason}",
            hints=["nothing committed is lost: remove the cause, then continue with --resume"],
        )
    folder = _nearest(path)
    usage = shutil.disk_usage(folder)
    return DiskError(
        f"{what} cannot be written to {path}: {reason}",
        hints=[
            f"{in_mebibytes(usage.free)} of {in_mebibytes(usage.total)} are free on the disk of {folder}",
            "nothing committed is lost: free some space, then continue with --resume",
        ],
    )


def require_room(what: str, folder: Path, size: int) -> None:
    """Raise `DiskError` if fewer than `size` bytes are free."""
    if free_bytes(folder) < max(size, FULL_BYTES):
        raise refused(what, folder, f"it takes {in_mebibytes(size)}, and the disk is full", is_full=True)


def wait_for_room(what: str, folder: Path, size: int, log: Callable[[str], None]) -> None:
    """Wait until `size` bytes are free; see `retry_refused`."""
    retry_refused(lambda: require_room(what, folder, size), log)


def retry_refused(write: Callable[[], None], log: Callable[[str], None]) -> None:
    """Call `write`, and retry it for `PATIENCE_S` seconds while the disk refuses. Log the first refusal.

    Raises:
        DiskError: the disk still refuses.
    """
    deadline = time.monotonic() + PATIENCE_S
    is_reported = False
    while True:
        try:
            return write()
        except DiskError as error:
            if time.monotonic() > deadline:
                raise
            if not is_reported:
                log(f"{error.message}; retrying for {PATIENCE_S:g} s")
            is_reported = True
        time.sleep(RETRY_INTERVAL_S)


def open_private(path: Path, mode: str, **options: Any) -> IO[Any]:
    """Open a file for writing. A new file can be read by its user only: it may have prompts, secrets or logs.

    Args:
        path: the file.
        mode: see `open`.
        options: see `open`.
    """
    return open(path, mode, opener=lambda name, flags: os.open(name, flags, 0o600), **options)


def append_line(what: str, path: Path, line: str) -> None:
    """Append a line to a file, completely or not at all.

    Raises:
        DiskError: the disk refuses.
    """
    data = f"{line}\n".encode()
    with writing(what, path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, "only a part was written")
        except OSError:
            file.truncate(end)
            raise


def append_events(path: Path, *events: Mapping[str, object]) -> None:
    """Append lines of JSON to a timeline. If the disk is full, the lines are lost."""
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(event)}\n" for event in events))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file that are JSON objects; none if there is no file.

    Other lines are skipped: a crash may have cut a line off, and a damaged disk may return anything.
    """
    lines = []
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            line = json.loads(text)
            if isinstance(line, dict):
                lines.append(line)
    return lines


def read_steps(path: Path) -> list[dict[str, Any]]:
    """Read the lines of a file that are JSON objects with an integer `step`. Other lines are skipped."""
    return [line for line in read_lines(path) if type(line.get("step")) is int]


def file_sizes(folder: Path) -> dict[str, int]:
    """Return the size in bytes of each file below a folder, by its relative path."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def changed_files(folder: Path, sizes: Mapping[str, int], digests: Mapping[str, int] | None = None) -> list[str]:
    """Describe each file of a folder that is missing or has another size or digest than before.

    Args:
        folder: folder of the files.
        sizes: former result of `file_sizes`.
        digests: former result of `file_digests`; None or empty skips the comparison of digests.

    Raises:
        OSError: a file cannot be read.
    """
    now = file_sizes(folder)
    changed = [
        f"{folder / name} had {size} bytes and {f'has {now[name]}' if name in now else 'is missing'}"
        for name, size in sizes.items()
        if now.get(name) != size
    ]
    if changed or not digests:
        return changed
    digests_now = file_digests(folder)
    damaged = [name for name, digest in digests.items() if digests_now.get(name) != digest]
    return [f"{folder / name} has other contents than were written" for name in damaged]


def file_digests(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each file below a folder, by its relative path. Files are read in chunks.

    Raises:
        OSError: a file cannot be read.
    """
    names = sorted(file_sizes(folder))
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(file_digest, [folder / name for name in names]), strict=True))


def file_digest(path: Path) -> int:
    """Return the CRC-32 of a file."""
    digest = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest = zlib.crc32(chunk, digest)
    return digest


def tree_size(folder: Path) -> int:
    """Return the size in bytes of all files below a folder."""
    return sum(file_sizes(folder).values())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and sync it and its name to disk. If the disk refuses, remove the file and raise `OSError`."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            path.unlink()  # an incomplete file only takes space
        raise


def replace_durably(path: Path, data: bytes) -> None:
    """Replace a file atomically. After a power cut it has the old or the new contents."""
    fresh = path.with_name(f".{path.name}.new")
    write_durably(fresh, data)
    fresh.replace(path)
    sync_folder(path.parent)


@contextmanager
def replacing_folder(what: str, folder: Path, *, swaps: bool = True) -> Iterator[Path]:
    """Yield a hidden folder to write into. When the block ends, sync it and let it replace `folder`.

    Args:
        what: name of what is written, for the error message.
        folder: folder to create or replace. It does not change if the block raises.
        swaps: False on ranks that only help to write; the main rank replaces the folder.

    Raises:
        DiskError: the disk refuses.
    """
    try:
        with writing(what, folder):
            yield fresh_folder(folder)
            if swaps:
                _swap(folder)
    finally:
        if swaps:
            settle_folder(folder)


def fresh_folder(folder: Path) -> Path:
    """Return the path of the hidden folder that may replace a folder. `settle_folder` removes it."""
    return folder.with_name(f".{folder.name}.{_STATES[0]}")


def _swap(folder: Path) -> None:
    """Sync the new folder and let it replace the former one."""
    fresh, former = (folder.with_name(f".{folder.name}.{state}") for state in _STATES)
    sync_tree(fresh)
    if folder.exists():
        folder.rename(former)
    fresh.rename(folder)
    sync_folder(folder.parent)


def settle_folder(folder: Path) -> None:
    """Complete or undo a replacement that a kill interrupted in `replacing_folder`."""
    fresh, former = (folder.with_name(f".{folder.name}.{state}") for state in _STATES)
    if former.exists() and not folder.exists():  # killed between the two renames: the new folder is complete
        (fresh if fresh.exists() else former).rename(folder)
    for left in (fresh, former):
        shutil.rmtree(left, ignore_errors=True)


def sync_names(folder: Path, top: Path) -> None:
    """Sync the name of a folder, and the names of its parents up to `top`, to disk."""
    for path in (folder, *folder.parents):
        sync_folder(path)
        if path == top.parent:
            return


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Sync everything below a folder, and the folder's name, to disk."""
    for path, _, names in os.walk(folder):
        for name in names:
            with Path(path, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))
    sync_folder(folder.parent)


def is_folder(path: Path) -> bool:
    """Return whether a folder exists. Unlike `Path.is_dir`, this does not raise if the name is too long."""
    return os.path.isdir(path)  # noqa: PTH112


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files from which transformers loads a model; empty if there are none.

    These are `model.safetensors`, or else the files in the index. A folder without both was written by areal, and all
    its files count. Other files, such as `consolidated.safetensors`, have the same weights under other names.

    Raises:
        RunError: the index cannot be read, or it names files that are missing.
    """
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if not (folder / WEIGHTS_INDEX).is_file():
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(indexed_files(folder).values()))]


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the name and shape of every tensor in `weight_files` from the files' headers, without torch.

    Raises:
        RunError: there are no weights, a file is incomplete, or the index does not fit the files.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    paths = weight_files(folder)
    for path in paths:
        try:
            if not path.is_file():  # opening a pipe would block
                raise OSError("it is neither a file nor a link to a file")
            with safe_open(path, "np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RunError(f"the weights in {path} are incomplete, or are a Git LFS pointer: {error}") from None
        except OSError as error:
            raise RunError(f"the weights in {path} cannot be read: {error}") from None
    if not shapes:
        is_old = any(folder.glob("*.bin"))
        hint = "it has weights in PyTorch's older format, *.bin: load them with transformers, then call save_pretrained"
        raise RunError(
            f"there are no weights in {folder}: it has no *.safetensors with tensors", hints=[hint] if is_old else []
        )
    is_indexed = (folder / WEIGHTS_INDEX).is_file() and paths != [folder / "model.safetensors"]
    if is_indexed and (absent := sorted(indexed_files(folder).keys() - shapes.keys())):
        raise RunError(f"{folder / WEIGHTS_INDEX} names tensors that no file has: {', '.join(absent[:3])}")
    return shapes


def indexed_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor from the folder's index. All these files exist."""
    index = folder / WEIGHTS_INDEX
    try:
        places = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
        missing = sorted({file for file in places.values() if not (folder / file).is_file()})
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{index} is not an index: {type(error).__name__}: {error}") from error
    if missing:
        raise RunError(f"{index} names files that are missing: {', '.join(missing[:3])}")
    return places
