"""No proxy variable applies to a run's own addresses."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest

from areal_core.config import public_environment
from areal_core.inference.http_client import HTTPAdapter
from areal_core.inference.programs import is_healthy, start_program
from areal_core.inference.settings import FleetSettings
from areal_core.proxies import bypass_proxies

DEAD = "http://127.0.0.1:9"
ASKS = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=20).status)"


class Healthy(BaseHTTPRequestHandler):
    """Answers every GET with 200."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def address(monkeypatch):
    """Yield the address of a server on loopback; every proxy variable names a dead port."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    server = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    ("already", "hosts", "wanted"),
    [
        ({}, (), "localhost,127.0.0.1,::1"),
        ({"no_proxy": "a, b"}, (), "a,b,localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, ("10.0.0.5",), "a,b,localhost,127.0.0.1,::1,10.0.0.5"),
        ({"NO_PROXY": "127.0.0.1"}, ("[fd00::1]", ""), "127.0.0.1,localhost,::1,fd00::1"),
        ({"no_proxy": "*"}, ("10.0.0.5",), "*"),
    ],
)
def test_both_variables_name_this_machine_and_keep_what_they_had(already, hosts, wanted):
    environment = dict(already)
    bypass_proxies(environment, hosts)
    assert environment == {"NO_PROXY": wanted, "no_proxy": wanted}
    bypass_proxies(environment, hosts)
    assert environment["NO_PROXY"] == wanted, "twice is once"


def test_the_health_of_a_server_is_asked_without_a_proxy(address):
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=20)
    adapter = type("Adapter", (HTTPAdapter,), dict.fromkeys(HTTPAdapter.__abstractmethods__))
    assert asyncio.run(is_healthy(adapter(FleetSettings()), address.rstrip("/")))


def test_a_program_of_a_server_reaches_its_own_address(address):
    arguments = [sys.executable, "-c", ASKS, address]
    command = SimpleNamespace(arguments=arguments, environment={"HTTP_PROXY": DEAD, "NO_PROXY": "intranet"})
    program = start_program(command, dict(os.environ), stdout=subprocess.PIPE)
    assert program.communicate(timeout=300)[0].strip() == b"200"


def test_a_program_with_the_public_environment_reaches_this_machine(address):
    """Reward processes, agents' commands and containers have it."""
    done = subprocess.run(
        [sys.executable, "-c", ASKS, address], env=public_environment(), capture_output=True, check=True
    )
    assert done.stdout.strip() == b"200"
