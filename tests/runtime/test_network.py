"""Ports that stay free until a server has started, and addresses and interfaces of this machine."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from areal_core.errors import RunError
from areal_core.runtime import network


def test_a_port_is_none_that_the_kernel_gives_to_connections() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first < 32_000:
        pytest.skip(f"this machine gives connections ports from {first}")
    assert max(network.free_port() for _ in range(100)) < first


def test_a_port_that_is_taken_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = network.free_port()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(network, "_PORTS", [taken.getsockname()[1], free])
        assert {network.free_port() for _ in range(20)} == {free}


def test_no_free_port_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(network, "_PORTS", [taken.getsockname()[1]])
        with pytest.raises(RunError, match="no free port"):
            network.free_port()


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("node-1.local", "http://node-1.local:80")],
)
def test_an_address_of_ipv6_stands_in_brackets(host: str, url: str) -> None:
    assert network.http_address(host, 80) == url


def test_interfaces_are_found_by_addresses_of_both_families() -> None:
    assert network.interface_of("127.0.0.1") == network.interface_of("::1") == "lo"
    assert network.interface_of("2001:db8::1") == network.interface_of("203.0.113.1") == ""
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        assert network.interface_of(":".join(digits[place : place + 4] for place in range(0, 32, 4))) == name
