"""What the trainer tells the outside world: metrics by step, and what it is doing right now."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from areal_core.interfaces.tracker import Tracker


class Journal:
    """Writes `metrics.jsonl` and `status/trainer.json`, feeds the trackers and measures phases. On rank 0.

    Args:
        run_dir: of the run.
        steps: of the whole run, for the live view.
        step: that the run (re)starts from; metrics of later steps belong to a discarded history and are removed.
        trackers: each is switched off after its first exception, which is told once.
        log: takes a line for the trainer's log.
    """

    def __init__(
        self, run_dir: Path, steps: int, step: int, trackers: Sequence[Tracker], log: Callable[[str], None]
    ) -> None:
        self._metrics_path = run_dir / "metrics.jsonl"
        self._status_path = run_dir / "status" / "trainer.json"
        self._status_path.parent.mkdir(exist_ok=True)
        self._steps = steps
        self._step = step
        self._log = log
        self._trackers = list(trackers)
        self._seconds: dict[str, float] = {}
        self._step_began = time.monotonic()
        self._keep_until(step)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what happens inside as `time/<name>_s` of the step, and show it in the live view."""
        began = time.monotonic()
        self._write_status(name)
        try:
            yield
        finally:
            key = f"time/{name}_s"
            self._seconds[key] = self._seconds.get(key, 0.0) + time.monotonic() - began

    def step_done(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Write the metrics of a step together with its times."""
        now = time.monotonic()
        line = {**metrics, **self._seconds, "time/step_s": now - self._step_began}
        self._seconds.clear()
        self._step_began, self._step = now, step
        with self._metrics_path.open("a") as file:
            file.write(json.dumps({"step": step, "time": time.time(), **line}) + "\n")
        self._tell_trackers(lambda tracker: tracker.log(step, line))
        return line

    def start_trackers(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """The run begins."""
        self._tell_trackers(lambda tracker: tracker.start(run_dir, config))

    def _tell_trackers(self, tell: Callable[[Tracker], None]) -> None:
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except Exception as error:  # noqa: BLE001 - a tracker must never end a run
                self._trackers.remove(tracker)
                self._log(f"tracker {type(tracker).__name__} is switched off: {type(error).__name__}: {error}")

    def finish(self, outcome: str) -> None:
        """The run is over."""
        self._write_status(outcome)
        self._tell_trackers(lambda tracker: tracker.close())

    def _write_status(self, phase: str) -> None:
        status = {"time": time.time(), "phase": phase, "step": self._step, "steps": self._steps}
        temporary = self._status_path.with_suffix(".new")
        temporary.write_text(json.dumps(status))
        temporary.rename(self._status_path)

    def _keep_until(self, step: int) -> None:
        if not self._metrics_path.is_file():
            return
        lines = self._metrics_path.read_text().splitlines()
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= step]
        if step == 0:
            kept = []
        temporary = self._metrics_path.with_suffix(".new")
        temporary.write_text("".join(f"{line}\n" for line in kept))
        temporary.rename(self._metrics_path)
