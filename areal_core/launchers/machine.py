"""What a node has: GPUs, ports, a network."""

from __future__ import annotations

import fcntl
import ipaddress
import itertools
import os
import re
import secrets
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence

_GPU_NAME = re.compile(r"\d+|(GPU|MIG)-.+")
_SIOCGIFADDR = 0x8915
GPUS = Path("/proc/driver/nvidia/gpus")
"""A folder for each GPU of the machine, where NVIDIA's driver runs."""
_PORTS = range(20_000, 32_000)
"""Below those of Linux's `ip_local_port_range`."""


def visible_gpus() -> list[str] | None:
    """Names of the GPUs that `CUDA_VISIBLE_DEVICES` shows of the machine's; None where it is not set and shows all.

    CUDA reads numbers, UUIDs and MIG names up to the first that is none of them, such as `-1`, or a number that the
    machine lacks, and shows none where a name comes twice.
    """
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    there = len(list(GPUS.glob("*"))) or sys.maxsize  # where the machine does not say, every number counts

    def is_shown(name: str) -> bool:
        return bool(_GPU_NAME.fullmatch(name)) and not (name.isdigit() and int(name) >= there)

    shown = list(itertools.takewhile(is_shown, map(str.strip, value.split(","))))
    return shown if len(set(shown)) == len(shown) else []


def count_gpus() -> int:
    """How many GPUs processes here would see; 0 also where the machine does not say."""
    shown = visible_gpus()
    return len(list(GPUS.glob("*")) if shown is None else shown)


def show_gpus(numbers: Sequence[int]) -> None:
    """Let this process and what it starts see only these GPUs.

    Args:
        numbers: of GPUs among those that this process sees, from 0.

    Raises:
        RunError: there is no such GPU.
    """
    shown = visible_gpus()
    if shown is not None and (missing := [number for number in numbers if number >= len(shown)]):
        value = os.environ["CUDA_VISIBLE_DEVICES"]
        raise RunError(
            f"GPU {missing[0]} is not among the {len(shown)} that CUDA_VISIBLE_DEVICES={value} shows, numbered from 0"
        )
    names = map(str, numbers) if shown is None else (shown[number] for number in numbers)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def free_port() -> int:
    """A port of this machine that nothing listens on now. A server binds it up to minutes later, so it is none of those
    that the kernel gives to connections meanwhile."""
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]  # also where every process has the same seed
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def http_address(host: str, port: int) -> str:
    """The URL of a server on a host: a name, or an address of IPv4 or IPv6."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def own_address() -> str:
    """The address by which this machine reaches other networks; loopback where it reaches none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the way
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Whether an IP address reaches this machine alone."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """The name of the network interface that has an IP address; empty where none is found."""
    if is_loopback(address):
        return "lo"
    if (wanted := ipaddress.ip_address(address)).version == 6:
        lines = Path("/proc/net/if_inet6").read_text().split("\n")  # the address in hexadecimal digits, ..., the name
        return next((line.split()[-1] for line in lines if line.startswith(wanted.packed.hex())), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
