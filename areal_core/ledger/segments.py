"""Segments: files of finished trajectories. The process that packs them writes them; others get a reference.

A segment is written once, synced to disk, and then announced; it never grows. So a reference is valid from the moment
at which another process receives it. A killed process leaves at most a file that has no reference.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.disk import retry_refused, sync_names, write_durably, writing
from areal_core.errors import LostError
from areal_core.interfaces.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class SegmentWriter:
    """Writes records in a thread. Records that arrive during a write go into one segment together.

    Args:
        folder: folder for the segments; the writer creates it.
        run_dir: folder of the run.
        name: prefix of the segments' names, unique among the processes of the run.
        log: writes a line to the run's log while the disk refuses.
    """

    def __init__(self, folder: Path, run_dir: Path, name: str, log: Callable[[str], None]) -> None:
        self._folder, self._run_dir, self._log = folder, run_dir, log
        self._name = f"{name}-{os.getpid()}"
        self._numbers = itertools.count()
        self._waiting: list[tuple[bytes, asyncio.Future[Record]]] = []
        self._flush: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> Record:
        """Write a record. Return the reference to it when it is synced to disk.

        Raises:
            DiskError: the disk refused for too long; see `areal_core.disk.retry_refused`.
        """
        written: asyncio.Future[Record] = asyncio.get_running_loop().create_future()
        self._waiting.append((data, written))
        if self._flush is None or self._flush.done():
            self._flush = start_task(self._write_all(), "writing of a segment")
        return await written

    async def _write_all(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            try:
                records = await asyncio.to_thread(self._write_segment, [data for data, _ in waiting])
            except Exception as error:  # noqa: BLE001 - the callers of `write` raise it
                for _, written in waiting:
                    if not written.done():
                        written.set_exception(error)
                continue
            for (_, written), record in zip(waiting, records, strict=True):
                if not written.done():
                    written.set_result(record)

    def _write_segment(self, parts: Sequence[bytes]) -> list[Record]:
        number = next(self._numbers)
        path = self._folder / f"{self._name}-{number:06d}.segment"

        def write() -> None:
            with writing("a segment", path):
                if not number:  # another writer may have created the folder without having synced its name yet
                    self._folder.mkdir(parents=True, exist_ok=True)
                    sync_names(self._folder, self._run_dir)
                write_durably(path, b"".join(parts))

        retry_refused(write, self._log)
        segment, records, offset = path.relative_to(self._run_dir).as_posix(), [], 0
        for part in parts:
            records.append(Record(segment, offset, len(part), _digest(part)))
            offset += len(part)
        return records


def read_record(run_dir: Path, record: Record) -> bytes:
    """Read the bytes of a record.

    Raises:
        LostError: the bytes are missing, or their digest is not that of the record.
    """
    path = run_dir / record.segment
    try:
        with path.open("rb") as file:
            file.seek(record.offset)
            data = file.read(record.size)
    except OSError as error:
        raise LostError(f"trajectories cannot be read from {path}: {error.strerror}", hints=_HINTS) from error
    if _digest(data) != record.digest:
        raise LostError(f"trajectories in {path} are damaged, from byte {record.offset} on", hints=_HINTS)
    return data


_HINTS = ("a resume generates damaged and missing trajectories again: areal run --resume RUN_DIR",)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
