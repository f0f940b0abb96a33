"""What the trainer reports: metrics by step to a file, to trackers and to plugins, and its phase to the driver.

Trackers and the hooks of plugins are other people's code in the trainer's process. Each is called in a thread of its
own (`Listener`), so that none of them can delay training or each other. Training waits only for the two hooks that
change the run: one adds metrics to a step before its line is written, the other may stop the run after it.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from areal_core.background import BackgroundQueue
from areal_core.disk import append_line, read_steps, replace_durably, retry_refused, writing
from areal_core.interfaces.tracker import BatchTracker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.interfaces.tracker import Tracker

QUEUE_SIZE = 1000
"""Calls that may wait for a listener that blocks. When there are more, the oldest are dropped."""
MAX_WAITING_FOR_BATCH = 8
"""A call that holds a whole batch is dropped if more than this many calls wait: batches are large."""
CLOSING_S = 60.0
"""Seconds that all listeners together get at the end of a run, for the calls that wait and for `close`."""


class Hooks(Protocol):
    """Plugins that observe a run; see `areal_core.plugins.events`."""

    @property
    def are_awaited(self) -> bool:
        """Whether there is a plugin that may add metrics or stop the run."""

    def add_metrics(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """Return further metrics of a step."""

    def should_stop(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> str:
        """Return why the run is to stop; empty if it is not."""

    def step_finished(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
        """The metrics of a step are complete."""

    def weights_synced(self, run_dir: Path, step: int, version: int) -> None:
        """The sync of `version` has begun."""

    def batch_logged(self, run_dir: Path, step: int, batch: PackedBatch) -> None:
        """A few groups of a batch have been trained on."""

    def checkpoint_saved(self, run_dir: Path, step: int, path: Path) -> None:
        """A checkpoint is committed at `path`."""


_Target = TypeVar("_Target")


class Listener(Generic[_Target]):
    """Calls a tracker, or the hooks, in a thread beside training. The first exception switches it off.

    Args:
        name: of what is called, for the log.
        target: the tracker or the hooks.
        log: takes a line for the user.
    """

    def __init__(self, name: str, target: _Target, log: Callable[[str], None]) -> None:
        self._name = name
        self._target = target
        self._log = log
        self._is_off = False
        self._queue = BackgroundQueue(f"calls of {name}", QUEUE_SIZE, self._report_dropped)

    def notify(self, call: Callable[[_Target], None], *, is_large: bool = False) -> None:
        """Queue a call and return immediately.

        Args:
            call: calls a method of the target.
            is_large: whether the call holds a whole batch; see `MAX_WAITING_FOR_BATCH`.
        """
        if self._is_off or (is_large and len(self._queue) > MAX_WAITING_FOR_BATCH):
            return
        if self._queue.put(partial(self._call, call)) == 1:
            self._log(f"{self._name} has blocked for {self._queue.blocked_s:.0f} s; dropping its oldest calls")

    def notify_last(self, call: Callable[[_Target], None]) -> None:
        """Queue the last call. It is made even if an exception has switched the target off."""
        self._queue.put(partial(self._call_safely, call))

    def close(self, deadline: float) -> None:
        """Wait until all calls are made, or until this time of `time.monotonic()`; log a target that still blocks."""
        if not self._queue.close(deadline):
            blocked_s, waiting = self._queue.blocked_s, len(self._queue)
            self._log(f"{self._name} has blocked for {blocked_s:.0f} s; the run ends without {waiting} queued calls")

    def _call(self, call: Callable[[_Target], None]) -> None:
        if not self._is_off:
            self._call_safely(call)

    def _call_safely(self, call: Callable[[_Target], None]) -> None:
        try:
            call(self._target)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a tracker must never end a run
            self._log(f"{self._name} is switched off: {type(error).__name__}: {error}")
            self._is_off = True

    def _report_dropped(self, count: int) -> None:
        self._log(f"{self._name} responds again; {count} calls were dropped")


class SilentMetricsLogger:
    """The metrics logger of all ranks but the main one: it enters phases, and writes nothing.

    Args:
        phase: enters a phase of this process, by its name.

    Attributes:
        stop_reason: why a plugin stops the run; empty as long as none does. Known on the main rank only.
    """

    def __init__(self, phase: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext()) -> None:
        self._enter_phase = phase
        self.stop_reason = ""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside as `time/<name>_s` of the step, and report the phase to the driver."""
        return self._enter_phase(name)

    def log(self, line: str) -> None:
        """Log a line for the user."""

    def note(self, step: int, text: str) -> None:
        """Log a line about a step, and keep it for `areal status`."""

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of a step with its times and the time of day. Later times belong to the next step."""
        return dict(metrics)

    def write_step(self, step: int, ended: Mapping[str, float]) -> None:
        """Write the line of a step, as `end_step` returned it, and report it to trackers and hooks."""

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step and write its line."""
        self.write_step(step, self.end_step(metrics))

    def weights_synced(self, step: int, version: int) -> None:
        """Report that the sync of `version` has begun."""

    def batch_logged(self, step: int, batch: PackedBatch | None) -> None:
        """Report a few groups of the batch of a step, with what the losses computed of their tokens."""

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """Report that a checkpoint is committed at `path`."""

    def close(self) -> None:
        """Close each tracker after its last call."""


class MetricsLogger(SilentMetricsLogger):
    """Writes metrics, notifies plugins and trackers, and times phases. On the main rank.

    Args:
        metrics: file of the run's metrics, a JSON line a step, in the run folder.
        step: that the run (re)starts from. Lines of later steps belong to a discarded history and are removed.
        trackers: each is switched off after its first exception, which is logged.
        hooks: of plugins.
        on_step: called with each line as soon as it is written.
        on_note: called with a step and a line about it that `areal status` is to show.
        phase: enters a phase of this process, by its name.
        log: takes a line for the user.
    """

    def __init__(
        self,
        metrics: Path,
        step: int,
        *,
        trackers: Sequence[Tracker] = (),
        hooks: Sequence[Hooks] = (),
        on_step: Callable[[dict[str, float]], None] = lambda _: None,
        on_note: Callable[[int, str], None] = lambda *_: None,
        phase: Callable[[str], AbstractContextManager[None]],
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(phase)
        self._metrics_path = metrics
        self._run_dir = metrics.parent
        self._log = log
        self._trackers: list[Listener[Tracker]] = [
            Listener(f"tracker {type(tracker).__name__}", tracker, log) for tracker in trackers
        ]
        self._hooks: list[Listener[Hooks]] = [Listener("a plugin's hook", hook, log) for hook in hooks]
        self._awaited_hooks = [hook for hook in hooks if hook.are_awaited]
        self._on_step = on_step
        self._on_note = on_note
        self._seconds: dict[str, float] = {}
        self._step_began = time.monotonic()
        self._keep_until(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """See `SilentMetricsLogger.phase`."""
        began = time.monotonic()
        try:
            with self._enter_phase(name):
                yield
        finally:
            key = f"time/{name}_s"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.monotonic() - began

    def log(self, line: str) -> None:
        """See `SilentMetricsLogger.log`."""
        self._log(line)

    def note(self, step: int, text: str) -> None:
        """See `SilentMetricsLogger.note`."""
        self._on_note(step, text)

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """See `SilentMetricsLogger.end_step`."""
        now = time.monotonic()
        line = {"time": time.time(), **metrics, **self._seconds, "time/step_s": now - self._step_began}
        self._seconds.clear()
        self._step_began = now
        return line

    def write_step(self, step: int, ended: Mapping[str, float]) -> None:
        """See `SilentMetricsLogger.write_step`. Plugins may add to the line, and stop the run because of it."""
        line = {name: value for name, value in ended.items() if name != "time"}
        for hooks in self._awaited_hooks:
            with self.phase("hooks"):
                added = hooks.add_metrics(self._run_dir, step, line)
            # Names of plugins have prefixes. Even without one, they would replace nothing.
            line |= {name: value for name, value in added.items() if name not in {"step", "time", *line}}
        written = json.dumps({"step": step, "time": ended["time"], **line})
        retry_refused(lambda: append_line("the metrics", self._metrics_path, written), self._log)
        self._notify_trackers(lambda tracker: tracker.log(step, line))
        self._on_step({"step": step, **line})
        for hooks in self._awaited_hooks:
            with self.phase("hooks"):
                self.stop_reason = hooks.should_stop(self._run_dir, step, line) or self.stop_reason
        self._notify_hooks(lambda hooks: hooks.step_finished(self._run_dir, step, line))

    def weights_synced(self, step: int, version: int) -> None:
        """See `SilentMetricsLogger.weights_synced`."""
        self._notify_hooks(lambda hooks: hooks.weights_synced(self._run_dir, step, version))

    def batch_logged(self, step: int, batch: PackedBatch | None) -> None:
        """See `SilentMetricsLogger.batch_logged`. A listener that is behind does not get the batch."""
        if batch is None:
            return
        self._notify_hooks(lambda hooks: hooks.batch_logged(self._run_dir, step, batch), is_large=True)
        self._notify_trackers(
            lambda tracker: tracker.log_batch(step, batch) if isinstance(tracker, BatchTracker) else None,
            is_large=True,
        )

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """See `SilentMetricsLogger.checkpoint_saved`."""
        self._notify_hooks(lambda hooks: hooks.checkpoint_saved(self._run_dir, step, path))

    def start_trackers(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start each tracker."""
        self._notify_trackers(lambda tracker: tracker.start(run_dir, config))

    def close(self) -> None:
        """Close each tracker after its last call, and wait `CLOSING_S` seconds at most for all of them together."""
        for tracker in self._trackers:
            tracker.notify_last(lambda target: target.close())
        deadline = time.monotonic() + CLOSING_S
        listeners: list[Listener[Any]] = [*self._trackers, *self._hooks]
        for listener in listeners:
            listener.close(deadline)

    def _notify_hooks(self, call: Callable[[Hooks], None], *, is_large: bool = False) -> None:
        for listener in self._hooks:
            listener.notify(call, is_large=is_large)

    def _notify_trackers(self, call: Callable[[Tracker], None], *, is_large: bool = False) -> None:
        for listener in self._trackers:
            listener.notify(call, is_large=is_large)

    def _keep_until(self, step: int) -> None:
        if not self._metrics_path.is_file():
            return
        kept = [line for line in read_steps(self._metrics_path) if step and line["step"] <= step]
        with writing("the metrics", self._metrics_path):
            replace_durably(self._metrics_path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
