"""Tracker for Prometheus: rank 0 of the trainer serves the metrics over HTTP while the run lasts."""

from __future__ import annotations

import math
import re
import socket
import sys
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.processes import http_address
from areal_trackers.libraries import load_library

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from areal_trackers.config import PrometheusSettings

ADDRESS_FILE = "prometheus.txt"
"""File in the run folder with the URL of the metrics."""
ROLE = "trainer"
"""Role of the process that calls trackers, for the label `role`."""
COUNTED = {"batch/sequences": "sequences", "batch/tokens": "tokens"}
"""Metrics of a step that are also summed in a counter."""


class PrometheusTracker:
    """A `Tracker` for Prometheus. The last value of each metric is a gauge `areal_NAME`.

    Steps, sequences and tokens are also counted. All have the labels `run`, the name of the run folder, and `role`.
    Counters restart at 0 with each process, as Prometheus expects; `areal_step` does not.

    Raises:
        ConfigError: prometheus_client is not installed.
    """

    def __init__(self, settings: PrometheusSettings) -> None:
        self._settings = settings
        self._library = load_library("prometheus", "prometheus_client")
        self._registry = self._library.CollectorRegistry()
        self._metrics: dict[str, Any] = {}
        self._labels: dict[str, str] = {}
        self._server: Any = None
        self._thread: Any = None

    def start(self, run_dir: Path, config: Mapping[str, object]) -> None:
        """Start the server; see `Tracker.start`.

        Raises:
            RunError: the address is not available.
        """
        host, port = self._settings.host, self._settings.port
        self._labels = {"run": run_dir.name, "role": ROLE}
        try:
            self._server, self._thread = self._library.start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            is_host = isinstance(error, socket.gaierror)
            hint = f"no address of this machine is called '{host}': set host" if is_host else "choose another port"
            if not is_host:
                hint += ", or port: 0 for a free one"
            raise RunError(f"metrics cannot be served at {host}:{port}: {error.strerror}; {hint}") from error
        address = f"{http_address(host, self._server.server_port)}/metrics"
        (run_dir / ADDRESS_FILE).write_text(f"{address}\n")
        sys.stderr.write(f"metrics for Prometheus: {address}\n")
        attempts = sum(path.name.isdigit() for path in (run_dir / "attempts").glob("*"))
        recoveries = self._gauge("recoveries", "times that the run was resumed, automatically or by a user")
        recoveries.set(max(0, attempts - 1))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Set the gauges and increase the counters; see `Tracker.log`."""
        self._gauge("step", "the last step").set(step)
        if "time/step_s" in metrics:
            self._counter("steps", "steps trained by this process").inc()
        for name, value in metrics.items():
            self._gauge(plain_name(name), f"{name} of the last step that has it").set(value)
            if name in COUNTED and math.isfinite(value) and value > 0:
                self._counter(COUNTED[name], f"{name} summed over the steps of this process").inc(value)

    def close(self) -> None:
        """Stop the server; see `Tracker.close`."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()
            self._server = None

    def _gauge(self, name: str, text: str) -> Any:
        return self._metric(self._library.Gauge, f"areal_{name}", text)

    def _counter(self, name: str, text: str) -> Any:
        return self._metric(self._library.Counter, f"areal_trained_{name}", text)

    def _metric(self, kind: Any, name: str, text: str) -> Any:
        """Return the metric of a name; create it the first time."""
        if name not in self._metrics:
            self._metrics[name] = kind(name, text, list(self._labels), registry=self._registry)
        return self._metrics[name].labels(**self._labels)


def plain_name(name: str) -> str:
    """Return a metric's name in Prometheus's form: `train/loss` becomes `train_loss`."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
