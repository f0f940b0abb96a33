"""What is asked of a machine: a port that nobody else gets before a server has started."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from areal_core.launchers import machine


def test_a_port_is_none_that_the_kernel_gives_to_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_000:
        pytest.skip(f"this machine gives connections ports from {first}")
    assert max(machine.free_port() for _ in range(100)) < first


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = machine.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(machine, "_PORTS", [taken.getsockname()[1], free])
        assert {machine.free_port() for _ in range(20)} == {free}
