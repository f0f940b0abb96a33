"""When checkpoints are made, and how: written while training goes on, where that can be, and committed when whole."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from areal_core.background import start_thread
from areal_core.disk import patiently, tree_size, wait_for_room
from areal_core.interfaces.training import SnapshotEngine
from areal_core.training.checkpoint import prune_checkpoints, write_checkpoint
from areal_core.training.distribution import agree, gather, host_number, own_barrier
from areal_core.training.host_memory import available_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.config.sections import CheckpointSection
    from areal_core.interfaces.training import TrainEngine
    from areal_core.training.checkpoint import ConsumptionLog
    from areal_core.training.metrics_logger import MetricsLogger
    from areal_core.training.source import BatchSource

SHARE_OF_MEMORY = 0.8
"""Of the host memory that is available, for snapshots; the rest is for rollouts, and for files on their way to disk."""


class Checkpointer:
    """Makes the run's checkpoints. The same on every rank; at most one of them is being written at any time.

    All is collective but `finish`, and ranks decide as rank 0 does; the threads that write have groups of their own.
    What such a thread fails with is raised in the one that trains, which looks every step.

    Args:
        section: settings.
        run_dir: of the run.
        checkpoints: the folder of this attempt's.
        engines: those that learn and EMAs, by role.
        source: commits, on rank 0.
        metrics_logger: is told of what was committed, on rank 0.
        phase: says, and times, that training waits.
        log: takes a line for the user.

    Attributes:
        latest: step of the checkpoint that was begun last, or that the run began from.
    """

    def __init__(
        self,
        section: CheckpointSection,
        run_dir: Path,
        checkpoints: Path,
        engines: Mapping[str, TrainEngine],
        source: BatchSource | None,
        metrics_logger: MetricsLogger | None,
        phase: Callable[[str], AbstractContextManager[None]],
        log: Callable[[str], None],
    ) -> None:
        self._section = section
        self._run_dir = run_dir
        self._checkpoints = checkpoints
        self._engines = engines
        self._source = source
        self._metrics_logger = metrics_logger
        self._phase = phase
        self._log = log
        self.latest = 0
        self._wait_for_all = own_barrier()
        self._hosts = gather(host_number())  # of each rank
        self._written: Future[Path] | None = None  # of the one that is being written
        self._began = time.monotonic()  # to train after the last one
        self._waited_s = 0.0  # for the last one
        self._size = 0
        self._is_reported = False

    def is_due(self, step: int) -> bool:
        """Whether a checkpoint is due: by steps, or as the last one is long ago; by time it takes a bounded share."""
        section = self._section
        if section.every and step % section.every == 0:
            return True
        if not section.every_s or self.is_writing:
            return False
        interval = max(section.every_s, self._waited_s / section.largest_share)
        return bool(agree(float(time.monotonic() - self._began >= interval)))

    def save(self, step: int, consumption_log: ConsumptionLog, *, is_last: bool) -> None:
        """Begin the checkpoint of `step`, unless there is one; the one before it is committed on return.

        Args:
            step: batches that the parameters have been trained on.
            consumption_log: of the trainer, now.
            is_last: nothing is trained after it, and it is committed on return.

        Raises:
            DiskError: the disk refuses.
        """
        self._waited_s = 0.0
        self.finish()
        if step == self.latest and step:
            return
        is_asynchronous = not is_last and self._may_go_on()
        with self._waiting():
            self._begin(step, consumption_log, is_asynchronous=is_asynchronous)
        if not is_asynchronous:
            self.finish()
        self._began = time.monotonic()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way."""
        return self._written is not None

    def look(self) -> None:
        """Commit the checkpoint that was being written, where it is whole by now."""
        if self._written is None:
            return
        is_done = self._written.done()
        if is_done:
            self._written.result()  # a rank whose part has failed waits for no other one
        if agree(float(is_done)):
            self.finish()

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is whole, and commit it; raises what its thread raised."""
        if self._written is None:
            return
        written, self._written = self._written, None
        with self._waiting():
            folder = written.result()
            if self._source is not None:
                self._size = tree_size(folder)
                patiently(partial(self._source.commit, self.latest, folder), self._log)
                try:
                    prune_checkpoints(self._run_dir, self._section.keep, folder)
                except OSError as error:  # the new one is committed, and the next time may go better
                    self._log(f"an old checkpoint cannot be removed: {error}")
            if self._metrics_logger is not None:
                self._metrics_logger.checkpoint_saved(self.latest, folder)

    def _begin(self, step: int, consumption_log: ConsumptionLog, *, is_asynchronous: bool) -> None:
        if self._source is not None:  # before all ranks write together, for they cannot try again one by one
            wait_for_room("a checkpoint", self._run_dir, self._size, self._log)
        writers = {
            role: engine.snapshot() if is_asynchronous and isinstance(engine, SnapshotEngine) else engine.save
            for role, engine in self._engines.items()
        }
        write = partial(
            write_checkpoint, self._checkpoints, step, writers, consumption_log.hand_over(), self._wait_for_all
        )
        self.latest, self._written = step, Future()
        fulfil = partial(_fulfil, self._written, write)
        if is_asynchronous:
            start_thread(fulfil, f"writing of the checkpoint of step {step}")
        else:
            fulfil()

    def _may_go_on(self) -> bool:
        """Whether training may, during the writing: engines make snapshots, and the host has memory for them."""
        engines = [engine for engine in self._engines.values() if isinstance(engine, SnapshotEngine)]
        if not self._section.asynchronous or len(engines) < len(self._engines):
            return False
        sizes, memory = gather(sum(engine.snapshot_size() for engine in engines)), gather(available_memory())
        on_hosts: dict[float, float] = defaultdict(float)
        for host, size in zip(self._hosts, sizes, strict=True):
            on_hosts[host] += size
        needs = [(on_hosts[host], free) for host, free in zip(self._hosts, memory, strict=True)]
        needed, available = max(needs, key=lambda each: each[0] / max(1.0, each[1]))
        fits = needed <= SHARE_OF_MEMORY * available
        if not fits and not self._is_reported:
            self._log(
                f"checkpoints are written while training waits: a copy of {needed / 1e9:,.1f} GB is too much for the "
                f"{available / 1e9:,.1f} GB of host memory that are available"
            )
            self._is_reported = True
        return fits

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Training waits for the checkpoint."""
        began = time.monotonic()
        with self._phase("checkpoint"):
            yield
        self._waited_s += time.monotonic() - began


def _fulfil(future: Future[Path], write: Callable[[], Path]) -> None:
    try:
        future.set_result(write())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the thread that trains raises it
        future.set_exception(error)
