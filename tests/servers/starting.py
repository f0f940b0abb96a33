"""The driver's part for the servers of one fleet, in tests that have no run."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import urllib.request
from concurrent.futures import Future
from contextlib import suppress

from areal_core.runtime.messages import ColocatedTraining, RestartMember, RoleMembers, ServingMember
from areal_core.runtime.network import free_port


class Starter:
    """The driver's part for the servers of one fleet: starts them, and again whenever one has ended.

    Attributes:
        model: that they serve; may be given until they are started.
        pids: of the servers, by name; each leads a process group.
    """

    host = "127.0.0.1"

    def __init__(self, settings, logs, model=None):
        self.settings, self.logs, self.model = settings, logs, model
        self.pids = {}
        self._serving, self._failed = {}, {}
        self._may_start = threading.Event()
        self._may_start.set()
        self._lock, self._is_over, self._threads = threading.Lock(), False, []

    def watch(self, role, changed):
        self._changed = changed
        for number in range(self.settings.bounds.maximum):
            thread = threading.Thread(target=self._keep, args=[f"server-{number}"])
            thread.start()
            self._threads.append(thread)

    def log(self, text):
        pass

    def notify(self, message):
        if isinstance(message, RestartMember):
            self.signal(message.name, signal.SIGKILL)
        elif isinstance(message, ColocatedTraining):
            (self._may_start.clear if message.is_active else self._may_start.set)()

    def request(self, message, timeout_s, waiting_for):
        self.notify(message)
        done = Future()
        done.set_result(None)
        return done

    def signal(self, name, kind):
        """To a server and everything that it started."""
        with suppress(ProcessLookupError, KeyError):
            os.killpg(self.pids[name], kind)

    def close(self):
        with self._lock:
            self._is_over = True
        self._may_start.set()
        for name in list(self.pids):
            self.signal(name, signal.SIGKILL)
        for thread in self._threads:
            thread.join()

    def _keep(self, name):
        while not self._is_over:
            self._may_start.wait()
            process, address, health = self._start(name)
            while process.poll() is None:
                if name not in self._serving and _answers(address + health):
                    self._serving[name] = ServingMember(name, address, True)
                    self._report()
                time.sleep(0.05)
            self.signal(name, signal.SIGKILL)
            if self._serving.pop(name, None) is None and not self._is_over:
                self._failed[name] = f"ended with {process.returncode}: {self._log(name).read_text()[-2000:]}"
                self._is_over = True
            self._report()

    def _start(self, name):
        port = free_port()
        command = self.settings.server_command(self.model, self.host, port, self.logs.parent)
        self.logs.mkdir(parents=True, exist_ok=True)
        with self._lock, self._log(name).open("ab") as log:
            words = [*command.arguments] if not self._is_over else ["true"]
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(
                words, env={**os.environ, **command.environment}, start_new_session=True, **streams
            )
            self.pids[name] = process.pid
        return process, f"http://{self.host}:{port}", command.health_path

    def _log(self, name):
        return self.logs / f"{name}.log"

    def _report(self):
        self._changed(RoleMembers("server", tuple(self._serving.values()), dict(self._failed)))


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False
