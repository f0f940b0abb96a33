"""What is asked of a machine: its GPUs, and a port that nobody else gets before a server has started."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from areal_core.errors import RunError
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


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("0,1,", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("0,0", []),
        ("GPU-8932f937,GPU-d1a2", ["GPU-8932f937", "GPU-d1a2"]),
        ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
    ],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert machine.visible_gpus() == names
    assert machine.count_gpus() == len(names)
    for number, name in enumerate(names):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        machine.show_gpus([number])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(RunError, match=f"GPU {len(names)} is not among the {len(names)} that CUDA_VISIBLE_DEVICES="):
        machine.show_gpus([len(names)])


def test_a_number_that_the_machine_lacks_ends_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine, "GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,99,1")
    assert machine.visible_gpus() == ["0"]


def test_a_machine_whose_gpus_are_all_shown_counts_them_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert machine.visible_gpus() is None
    machine.show_gpus([2, 5])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:80"), ("::1", "http://[::1]:80"), ("node-1.local", "http://node-1.local:80")],
)
def test_an_address_of_ipv6_stands_in_brackets(host: str, url: str) -> None:
    assert machine.http_address(host, 80) == url


def test_interfaces_are_found_by_addresses_of_both_families() -> None:
    assert machine.interface_of("127.0.0.1") == machine.interface_of("::1") == "lo"
    assert machine.interface_of("2001:db8::1") == machine.interface_of("203.0.113.1") == ""
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        assert machine.interface_of(":".join(digits[place : place + 4] for place in range(0, 32, 4))) == name
