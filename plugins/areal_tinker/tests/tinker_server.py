"""A server that a test starts, kills and starts again, and a client with the official SDK. Imported by path."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import tinker
from tinker import types

from areal_core.processes import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IDS = [5, 9, 12, 7, 30, 41, 8, 3]


class TinkerServer:
    """`areal tinker serve` in a process.

    Args:
        folder: for everything that the server writes.
        model: the base model.
        options: further arguments.
        engine: the inference engine, as a value of the config.
        environment: further environment variables.
    """

    def __init__(self, folder: Path, model: Path, *options: str, engine: Any = "hf", **environment: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.run_dir = folder / "run"
        self.model = str(model)
        self._log = folder / "serve.log"
        words = ["tinker", "serve", "--model", str(model), "--port", str(self.port), "--run-dir", str(self.run_dir)]
        words += [f"inference_engine={json.dumps(engine)}", *options]
        self._command = [sys.executable, "-m", "areal_core", *words]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **environment}
        self._process: subprocess.Popen[bytes] | None = None
        self._services: list[tinker.ServiceClient] = []

    def start(self) -> TinkerServer:
        """Start the server, and return when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, env=self._environment, stdout=log, stderr=log)
        while not self.answers():
            assert self._process.poll() is None, self.log()
            time.sleep(0.1)
        return self

    def connect(self, key: str = "tml-test") -> tinker.ServiceClient:
        """Return a client. It is closed when the server is stopped: its heartbeats would not end otherwise."""
        self._services.append(tinker.ServiceClient(base_url=self.url, api_key=key))
        return self._services[-1]

    def answers(self) -> bool:
        """Return whether the server answers requests."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/healthz", timeout=5) as response:
                return bool(response.status == 200)
        except OSError as error:
            return isinstance(error, urllib.error.HTTPError) and error.code == 401

    def log(self) -> str:
        """Return what the server has printed."""
        return self._log.read_text()

    def kill(self) -> None:
        """Kill the driver; its processes end themselves."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Close its clients, and stop the server as Ctrl-C does. Return its exit code; -1 if it has ended already."""
        services, self._services = self._services, []
        if self._process is None or self._process.poll() is not None:
            return -1
        for service in services:
            with suppress(tinker.APIStatusError):  # a client with a wrong key cannot finish its session either
                service.close("success").result(60)
        self._process.send_signal(signal.SIGINT)
        return self._process.wait(120)

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Send a request without the SDK. Return status and body."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        form = {"Content-Type": "application/json", **headers}
        request = urllib.request.Request(f"{self.url}/api/v1/{path}", content, form)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read() or b"{}")


@contextmanager
def serving(*arguments: Any, **settings: Any) -> Iterator[TinkerServer]:
    """Start a server in this context; see `TinkerServer` for the arguments."""
    server = TinkerServer(*arguments, **settings)
    try:
        yield server.start()
    finally:
        server.stop()


def datum(ids: list[int] = IDS, **inputs: list[float]) -> types.Datum:
    """Return a datum for the loss `cross_entropy`, or with other inputs for other losses."""
    targets: dict[str, Any] = {"target_tokens": ids[1:], **(inputs or {"weights": [1.0] * (len(ids) - 1)})}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=targets)


def adam(rate: float = 1e-2) -> types.AdamParams:
    """Return the hyperparameters of a step."""
    return types.AdamParams(learning_rate=rate)
