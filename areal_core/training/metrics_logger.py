"""What the trainer tells the outside world: metrics by step, and what it is doing right now.

Each tracker is called in a thread of its own, and so are the hooks of plugins: one that blocks holds up no other.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from areal_core.disk import append_line, patiently, read_steps, replace_durably, writing
from areal_core.interfaces.tracker import BatchTracker
from areal_core.training.aside import PATIENCE_S, Aside

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from areal_core.data import PackedBatch
    from areal_core.interfaces.tracker import Tracker


class Hooks(Protocol):
    """Plugins that are told of what happened; see `areal_core.plugins.events`."""

    def step_finished(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over."""

    def weights_synced(self, run_dir: Path, step: int, version: int) -> None:
        """The sync of `version` has begun."""

    def batch_logged(self, run_dir: Path, step: int, batch: PackedBatch) -> None:
        """A few groups of a batch have been trained on."""

    def checkpoint_saved(self, run_dir: Path, step: int, path: Path) -> None:
        """A checkpoint is committed at `path`."""


class MetricsLogger:
    """Writes metrics, tells plugins and trackers, and measures phases. On rank 0.

    Args:
        metrics: file of the run's metrics, a JSON line a step, in the run folder.
        step: that the run (re)starts from; metrics of later steps belong to a discarded history and are removed.
        trackers: each is switched off after its first exception, which is logged.
        hooks: of plugins.
        on_step: told of each line that is written, at once.
        phase: says what this process is doing.
        log: takes a line for whoever watches the run.
    """

    def __init__(
        self,
        metrics: Path,
        step: int,
        *,
        trackers: Sequence[Tracker] = (),
        hooks: Sequence[Hooks] = (),
        on_step: Callable[[dict[str, float]], None] = lambda _: None,
        phase: Callable[[str], AbstractContextManager[None]],
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._metrics_path = metrics
        self._run_dir = metrics.parent
        self.log = log
        self._phase = phase
        self._trackers = [(tracker, Aside(f"tracker {type(tracker).__name__}", log)) for tracker in trackers]
        self._hooks = [(each, Aside("a plugin's hook", log)) for each in hooks]
        self._on_step = on_step
        self._seconds: dict[str, float] = {}
        self._step_began = time.monotonic()
        self._keep_until(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside as `time/<name>_s` of the step, and say that it happens."""
        began = time.monotonic()
        try:
            with self._phase(name):
                yield
        finally:
            key = f"time/{name}_s"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.monotonic() - began

    def end_step(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of a step together with its times and the hour; what comes now belongs to the next one."""
        now = time.monotonic()
        line = {"time": time.time(), **metrics, **self._seconds, "time/step_s": now - self._step_began}
        self._seconds.clear()
        self._step_began = now
        return line

    def finish_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """End a step and write its line."""
        self.write_step(step, self.end_step(metrics))

    def write_step(self, step: int, ended: Mapping[str, float]) -> None:
        """Write the line of a step, as `end_step` has made it."""
        line = {name: value for name, value in ended.items() if name != "time"}
        written = json.dumps({"step": step, "time": ended["time"], **line})
        patiently(lambda: append_line("the metrics", self._metrics_path, written), self.log)
        self._notify_trackers(lambda tracker: tracker.log(step, line))
        self._on_step({"step": step, **line})
        self._notify_hooks(lambda hooks: hooks.step_finished(self._run_dir, step, line))

    def weights_synced(self, step: int, version: int) -> None:
        """The sync of `version` has begun."""
        self._notify_hooks(lambda hooks: hooks.weights_synced(self._run_dir, step, version))

    def batch_logged(self, step: int, batch: PackedBatch) -> None:
        """A few groups of the batch of a step, with what the losses made of their tokens; left out where those who are
        told of it fall behind."""
        self._notify_hooks(lambda hooks: hooks.batch_logged(self._run_dir, step, batch), is_large=True)
        self._notify_trackers(
            lambda tracker: tracker.log_batch(step, batch) if isinstance(tracker, BatchTracker) else None,
            is_large=True,
        )

    def checkpoint_saved(self, step: int, path: Path) -> None:
        """A checkpoint is committed at `path`."""
        self._notify_hooks(lambda hooks: hooks.checkpoint_saved(self._run_dir, step, path))

    def start_trackers(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """The run begins."""
        self._notify_trackers(lambda tracker: tracker.start(run_dir, config))

    def close(self) -> None:
        """The run is over: close each tracker behind its last call. All of them together have a minute."""
        for tracker, aside in self._trackers:
            aside.end(tracker.close)
        for _, aside in self._hooks:
            aside.end(lambda: None)
        deadline = time.monotonic() + PATIENCE_S
        for _, aside in (*self._trackers, *self._hooks):
            aside.wait(deadline)

    def _notify_hooks(self, log: Callable[[Hooks], None], *, is_large: bool = False) -> None:
        for hooks, aside in self._hooks:
            aside.do(partial(log, hooks), is_large=is_large)

    def _notify_trackers(self, log: Callable[[Tracker], None], *, is_large: bool = False) -> None:
        for tracker, aside in self._trackers:
            aside.do(partial(log, tracker), is_large=is_large)

    def _keep_until(self, step: int) -> None:
        if not self._metrics_path.is_file():
            return
        kept = [line for line in read_steps(self._metrics_path) if step and line["step"] <= step]
        with writing("the metrics", self._metrics_path):
            replace_durably(self._metrics_path, "".join(f"{json.dumps(line)}\n" for line in kept).encode())
