"""Writing to disk so that a power cut takes nothing that was called durable, and saying which disk refuses; and what
is in the weights of a model's folder."""

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
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


PATIENCE_S = 60.0
"""How long a run waits for a disk that refuses: somebody may be making room, or another program may just be done."""
RETRY_INTERVAL_S = 0.25
READERS = 8
"""Files that are read at once for their digests: a disk of many is slow to a single reader."""
CHUNK_BYTES = 1 << 22
_STATES = ("new", "former")
"""Of hidden folders beside one that is being replaced."""
FULL_BYTES = 1 << 20
"""Less than this free is full: whoever fails now failed for want of room."""


class DiskError(RunError):
    """The disk refuses to be written: it is full, read-only, or not ours. It may take the same again a moment later."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Turn what the system says of a failed write into one sentence.

    Args:
        what: is written, in words: "the ledger".
        path: where.

    Raises:
        DiskError: names the disk, why it refuses, and what is free on it.
    """
    try:
        yield
    except RunError:  # it is in our words already
        raise
    except Exception as error:
        if reason := _reason(error, path):
            raise refused(what, path, reason) from error
        raise


def _reason(error: Exception, path: Path) -> str:
    """Why the disk refused; empty for an error that is none of the disk's."""
    if isinstance(error, OSError):
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return "the disk is full" if is_full else str(error.strerror or error)
    # PyTorch and safetensors say it in words of their own ("iostream error", "unexpected pos 704").
    return "the disk is full" if free_bytes(path) < FULL_BYTES else ""


def free_bytes(path: Path) -> int:
    """Return the bytes that are free on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(_nearest(path)).free


def _nearest(path: Path) -> Path:
    """The folder itself, or the lowest one above it that exists."""
    return next(folder for folder in (path, *path.absolute().parents) if folder.is_dir())


def in_mebibytes(size: int) -> str:
    """Return a number of bytes for people."""
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"


def refused(what: str, path: Path, reason: str) -> DiskError:
    """The error of a write that was refused, with what is free there."""
    usage = shutil.disk_usage(place := _nearest(path))
    return DiskError(
        f"{what} cannot be written to {path}: {reason}",
        hints=[
            f"{in_mebibytes(usage.free)} of {in_mebibytes(usage.total)} are free on the disk of {place}",
            "nothing committed is lost: make room, then continue with --resume",
        ],
    )


def require_room(what: str, folder: Path, size: int) -> None:
    """Raise `DiskError` where fewer than `size` bytes are free."""
    if free_bytes(folder) < max(size, FULL_BYTES):
        raise refused(what, folder, f"it takes {in_mebibytes(size)}, and the disk is full")


def wait_for_room(what: str, folder: Path, size: int, log: Callable[[str], None]) -> None:
    """Return when `size` bytes are free; raises as `patiently`, after as long a wait."""
    patiently(lambda: require_room(what, folder, size), log)


def patiently(write: Callable[[], None], log: Callable[[str], None]) -> None:
    """Write, again and again for a while where the disk refuses, and say so once.

    Raises:
        DiskError: it still does.
    """
    deadline, is_reported = time.monotonic() + PATIENCE_S, False
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


def append_line(what: str, path: Path, line: str) -> None:
    """Append a line whole or not at all.

    Raises:
        DiskError: the disk refuses.
    """
    data = f"{line}\n".encode()
    with writing(what, path), path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, "the disk took a part of it")
        except OSError:
            file.truncate(end)
            raise


def append_events(path: Path, *events: Mapping[str, object]) -> None:
    """Append lines of JSON to what a run records of itself; a disk that is full costs the lines."""
    with suppress(OSError), path.open("a", encoding="utf-8") as file:
        file.write("".join(f"{json.dumps(event)}\n" for event in events))


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The JSON objects with a step in a file, a line each, and nothing else: a crash may have cut a line off, and a
    damaged disk may hold anything."""
    steps = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and type(found.get("step")) is int:
                steps.append(found)
    return steps


def file_sizes(folder: Path) -> dict[str, int]:
    """Bytes of each file below a folder, by its path in it."""
    return {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}


def changed_files(folder: Path, sizes: Mapping[str, int], digests: Mapping[str, int] | None = None) -> list[str]:
    """Of the files that a folder had, those that are not there any more or have another size or digest, in words.

    Args:
        folder: of the files.
        sizes: as `file_sizes` gave them.
        digests: as `file_digests` gave them; None or empty reads no file.

    Raises:
        OSError: a file cannot be read.
    """
    now = file_sizes(folder)
    changed = [
        f"{folder / name} had {size} bytes and {f'has {now[name]}' if name in now else 'is missing'}"
        for name, size in sizes.items()
        if now.get(name) != size
    ]
    found = file_digests(folder) if digests and not changed else {}
    odd = [name for name, digest in (digests or {}).items() if found and found.get(name) != digest]
    return changed + [f"{folder / name} holds other bytes than were written" for name in odd]


def file_digests(folder: Path) -> dict[str, int]:
    """CRC-32 of each file below a folder, by its path in it; big files are never in memory whole.

    Raises:
        OSError: a file cannot be read.
    """
    names = sorted(file_sizes(folder))
    with ThreadPoolExecutor(READERS) as readers:
        return dict(zip(names, readers.map(file_digest, [folder / name for name in names]), strict=True))


def file_digest(path: Path) -> int:
    """CRC-32 of a file."""
    digest = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest = zlib.crc32(chunk, digest)
    return digest


def tree_size(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file_sizes(folder).values())


def write_durably(path: Path, data: bytes) -> None:
    """Write a file; when this returns, file and name outlast a power cut. Where the disk refuses, nothing is left."""
    try:
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            path.unlink()  # the half of it that was written would only take room
        raise


def replace_durably(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, also where the power is cut."""
    fresh = path.with_name(f".{path.name}.new")
    write_durably(fresh, data)
    fresh.replace(path)
    sync_folder(path.parent)


@contextmanager
def replacing_folder(what: str, folder: Path, *, swaps: bool = True) -> Iterator[Path]:
    """A hidden folder to write into; it takes the place of another one, whole and synced, when the block ends.

    Args:
        what: is written, in words.
        folder: is replaced, where it is there; it stays as it was where the block fails.
        swaps: False on ranks that help to write, and leave the rest to the first one.

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
    """Where what may replace a folder is written first; `settle_folder` removes it."""
    return folder.with_name(f".{folder.name}.{_STATES[0]}")


def _swap(folder: Path) -> None:
    """Let what is fresh take the place of a folder, whole and synced."""
    fresh, former = (folder.with_name(f".{folder.name}.{state}") for state in _STATES)
    sync_tree(fresh)
    if folder.exists():
        folder.rename(former)
    fresh.rename(folder)
    sync_folder(folder.parent)


def settle_folder(folder: Path) -> None:
    """Put right what a process has left that was killed within `replacing_folder`, or between two of its own steps."""
    fresh, former = (folder.with_name(f".{folder.name}.{state}") for state in _STATES)
    if former.exists() and not folder.exists():  # between the two renames: what is fresh is whole
        (fresh if fresh.exists() else former).rename(folder)
    for left in (fresh, former):
        shutil.rmtree(left, ignore_errors=True)


def sync_names(folder: Path, top: Path) -> None:
    """Let the name of a folder, and of all above it up to that of `top`, outlast a power cut."""
    for path in (folder, *folder.parents):
        sync_folder(path)
        if path == top.parent:
            return


def sync_folder(folder: Path) -> None:
    """Let the names in a folder outlast a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Let everything below a folder, and its own name, outlast a power cut."""
    for path, _, names in os.walk(folder):
        for name in names:
            with Path(path, name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(path))
    sync_folder(folder.parent)


def is_folder(path: Path) -> bool:
    """Whether a folder is there; a name that is too long for one is none (`Path.is_dir` raises)."""
    return os.path.isdir(path)  # noqa: PTH112


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor in the safetensors files of a folder, from their headers; imports no torch.

    Raises:
        RunError: there are none, or one of them is not complete; or there is an index that does not fit them.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            if not path.is_file():  # a pipe would be waited for
                raise OSError("it is not a file, nor a link to one")
            with safe_open(path, "np") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise RunError(f"the weights in {path} are not complete, or a Git LFS pointer: {error}") from None
        except OSError as error:
            raise RunError(f"the weights in {path} cannot be read: {error}") from None
    if not shapes:
        raise RunError(f"there are no weights in {folder}: it holds no *.safetensors with tensors")
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():  # which is read first
        try:
            places = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
            missing = sorted({file for file in places.values() if not (folder / file).is_file()})
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise RunError(f"{index} is not an index: {type(error).__name__}: {error}") from error
        if missing:
            raise RunError(f"{index} names files that are missing: {', '.join(missing[:3])}")
        if absent := sorted(places.keys() - shapes.keys()):
            raise RunError(f"{index} names tensors that no file holds: {', '.join(absent[:3])}")
    return shapes
