"""When checkpoints are made, and how: a thread writes them while training continues, where engines and memory allow it.

    save ──► snapshot in host memory ──► written by a thread ──► committed by `poll` or `finish`, on the training thread

A kill before the commit costs the steps since the checkpoint before, and nothing else.
"""

from __future__ import annotations

import socket
import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from areal_core.background import start_thread
from areal_core.disk import retry_refused, tree_size, wait_for_room
from areal_core.interfaces.training import SnapshotEngine
from areal_core.training.checkpoint import prune_checkpoints, write_checkpoint
from areal_core.training.collectives import all_gather, all_gather_text, broadcast, is_main, new_barrier
from areal_core.training.host_memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from areal_core.config.sections import CheckpointSection
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.metrics_logger import SilentMetricsLogger
    from areal_core.training.source import SharedSource
    from areal_core.training.state import TrainerState

SHARE_OF_MEMORY = 0.8
"""Share of the available host memory that snapshots may take. The rest is for rollouts and for the page cache."""


class Checkpointer:
    """Makes the run's checkpoints, the same on every rank; at most one is being written at any time.

    All methods are collective except `finish`: the writing threads have a barrier of their own. An exception of such a
    thread is raised on the training thread by `poll`, `finish` or `save`.

    Args:
        section: settings.
        run_dir: of the run.
        checkpoints: folder of this attempt's checkpoints.
        engines: those that learn and EMAs, by role.
        source: commits checkpoints.
        metrics_logger: times the phase `checkpoint`, in which training waits, and reports commits.

    Attributes:
        latest: step of the checkpoint that was begun last, or that the run began from.
    """

    def __init__(
        self,
        section: CheckpointSection,
        run_dir: Path,
        checkpoints: Path,
        engines: Mapping[str, TrainEngine],
        source: SharedSource,
        metrics_logger: SilentMetricsLogger,
    ) -> None:
        self._section = section
        self._run_dir = run_dir
        self._checkpoints = checkpoints
        self._engines = engines
        self._source = source
        self._metrics_logger = metrics_logger
        self.latest = 0
        self._barrier = new_barrier()
        self._hosts = all_gather_text(socket.gethostname())  # of each rank
        self._writing: Future[Path] | None = None
        self._last_saved_at = time.monotonic()
        self._waited_s = 0.0  # that training waited for the last checkpoint
        self._size = 0  # bytes of the last checkpoint
        self._has_reported_memory = False

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._writing is not None

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due: by the number of steps, or by the time since the last one.

        By time, checkpoints are made less often than configured if training would wait for them too long.
        """
        section = self._section
        if section.every and step % section.every == 0:
            return True
        if not section.every_s or self.is_writing:
            return False
        interval_s = max(section.every_s, self._waited_s / section.largest_share)
        return bool(broadcast(float(time.monotonic() - self._last_saved_at >= interval_s)))

    def save(self, state: TrainerState, *, is_last: bool) -> None:
        """Begin the checkpoint of the current step, unless it has one. On return the checkpoint before is committed.

        Args:
            state: of the trainer, now.
            is_last: whether this checkpoint, too, is committed on return, because nothing is trained after it.

        Raises:
            DiskError: a file cannot be written.
        """
        self._waited_s = 0.0
        self.finish()
        if state.step == self.latest and state.step:
            return
        writes_in_thread = not is_last and self._can_snapshot()
        with self._waiting():
            self._begin(state, writes_in_thread=writes_in_thread)
        if not writes_in_thread:
            self.finish()
        self._last_saved_at = time.monotonic()

    def poll(self) -> None:
        """Commit the checkpoint that is being written if all ranks have written their parts by now."""
        if self._writing is None:
            return
        is_done = self._writing.done()
        if is_done:
            self._writing.result()  # raises this rank's error without waiting for the other ranks
        if broadcast(float(is_done)):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and commit it. Raises what its thread raised."""
        if self._writing is None:
            return
        writing, self._writing = self._writing, None
        with self._waiting():
            folder = writing.result()
            if is_main():
                self._size = tree_size(folder)
                retry_refused(partial(self._source.commit, self.latest, folder), self._metrics_logger.log)
                try:
                    prune_checkpoints(self._run_dir, self._section.keep, folder)
                except OSError as error:  # the new checkpoint is committed; the next pruning tries again
                    self._metrics_logger.log(f"an old checkpoint cannot be removed: {error}")
            self._metrics_logger.checkpoint_saved(self.latest, folder)

    def _begin(self, state: TrainerState, *, writes_in_thread: bool) -> None:
        if is_main():  # before all ranks write: they write together, and one rank alone cannot retry
            wait_for_room("a checkpoint", self._run_dir, self._size, self._metrics_logger.log)
        writers = {
            role: engine.snapshot() if writes_in_thread and isinstance(engine, SnapshotEngine) else engine.save
            for role, engine in self._engines.items()
        }
        write = partial(write_checkpoint, self._checkpoints, state.take_snapshot(), writers, self._barrier)
        self.latest, self._writing = state.step, Future()
        run = partial(_run, write, self._writing)
        if writes_in_thread:
            start_thread(run, f"writing of the checkpoint of step {state.step}")
        else:
            run()

    def _can_snapshot(self) -> bool:
        """Return whether all engines make snapshots, and every host has memory for those of its ranks."""
        engines = [engine for engine in self._engines.values() if isinstance(engine, SnapshotEngine)]
        if not self._section.asynchronous or len(engines) < len(self._engines):
            return False
        sizes = all_gather(sum(engine.snapshot_size() for engine in engines))
        free = all_gather(available_memory())
        size_on_host: dict[str, float] = defaultdict(float)
        for host, size in zip(self._hosts, sizes, strict=True):
            size_on_host[host] += size
        needs = [(size_on_host[host], available) for host, available in zip(self._hosts, free, strict=True)]
        needed, available = max(needs, key=lambda need: need[0] / max(1.0, need[1]))
        fits = needed <= SHARE_OF_MEMORY * available
        if not fits and not self._has_reported_memory:
            self._metrics_logger.log(
                f"training waits while checkpoints are written: a copy of {needed / 1e9:,.1f} GB does not fit the "
                f"{available / 1e9:,.1f} GB of host memory that are available"
            )
            self._has_reported_memory = True
        return fits

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Time how long training waits for the checkpoint."""
        began = time.monotonic()
        with self._metrics_logger.phase("checkpoint"):
            yield
        self._waited_s += time.monotonic() - began


def _run(write: Callable[[], Path], written: Future[Path]) -> None:
    try:
        written.set_result(write())
    except BaseException as error:  # noqa: BLE001 - the training thread raises it, whatever it is
        written.set_exception(error)
