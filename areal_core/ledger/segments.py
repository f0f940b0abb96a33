"""Segments: files of finished trajectories, written by whoever has packed them. Only a reference travels.

A segment is written once, synced, and then told of; nobody appends to one. So a reference is valid from the moment in
which somebody hears of it, and a process that is killed leaves at most a file that nobody names.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from typing import TYPE_CHECKING

from areal_core.background import start_task
from areal_core.disk import patiently, sync_names, write_durably, writing
from areal_core.errors import LostError
from areal_core.interfaces.record import Record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path


class SegmentWriter:
    """Writes records, all that have come meanwhile into one segment, in a thread.

    Args:
        folder: for the segments; is made.
        run_dir: of the run.
        name: begins the names of this writer's segments, which are unlike any other process's.
        log: told when the disk refuses.
    """

    def __init__(self, folder: Path, run_dir: Path, name: str, log: Callable[[str], None]) -> None:
        self._folder, self._run_dir, self._log = folder, run_dir, log
        self._name = f"{name}-{os.getpid()}"
        self._numbers = itertools.count()
        self._waiting: list[tuple[bytes, asyncio.Future[Record]]] = []
        self._flush: asyncio.Task[None] | None = None

    async def write(self, data: bytes) -> Record:
        """Where the bytes lie, once they outlast a power cut.

        Raises:
            DiskError: the disk has refused for a while.
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
            except Exception as error:  # noqa: BLE001 - whoever waits shall hear of it
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
                if not number:  # another writer may have made it, and not have synced it yet
                    self._folder.mkdir(parents=True, exist_ok=True)
                    sync_names(self._folder, self._run_dir)
                write_durably(path, b"".join(parts))

        patiently(write, self._log)
        segment, records, offset = path.relative_to(self._run_dir).as_posix(), [], 0
        for part in parts:
            records.append(Record(segment, offset, len(part), _digest(part)))
            offset += len(part)
        return records


def read_record(run_dir: Path, record: Record) -> bytes:
    """The bytes of a record.

    Raises:
        LostError: they are not there, or not those that were written.
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


_HINTS = ("a resume generates what is damaged or missing anew: areal run --resume RUN_DIR",)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
