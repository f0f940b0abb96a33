"""What a node has: GPUs, ports, a network. Standard library only."""

from __future__ import annotations

import fcntl
import os
import secrets
import socket
import struct
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915
_PORTS = range(20_000, 32_000)
"""Below those of Linux's `ip_local_port_range`."""


def visible_gpus() -> list[str]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves of the machine's, as it names them; empty where it leaves all."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").strip()
    return [name.strip() for name in shown.split(",")] if shown else []


def count_gpus() -> int:
    """How many GPUs processes here would see; 0 also where the machine does not say."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0
    return len(visible_gpus()) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def free_port() -> int:
    """A port of this machine that nothing listens on now. A server binds it up to minutes later, so it is none of those
    that the kernel gives to connections meanwhile."""
    while True:
        port = _PORTS[secrets.randbelow(len(_PORTS))]  # also where every process has the same seed
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port


def own_address() -> str:
    """The address by which this machine reaches other networks; loopback where it reaches none."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses the way
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def interface_of(address: str) -> str:
    """The name of the network interface that has an IPv4 address; empty where none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""
