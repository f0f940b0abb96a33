"""Addresses, ports and network interfaces of this machine."""

from __future__ import annotations

import fcntl
import ipaddress
import random
import socket
import struct
from contextlib import suppress
from pathlib import Path

from areal_core.errors import RunError

_SIOCGIFADDR = 0x8915
"""Request of ioctl(2) for the IPv4 address of an interface."""
_PORTS = range(20_000, 32_000)
"""Ports below Linux's `ip_local_port_range`, from which the kernel takes ports for outgoing connections."""
_TRIES = 1000
"""Random ports that are tried before an error is raised."""
_OUTSIDE = ("192.0.2.1", 9)
"""An address of other networks, reserved for documentation."""


def free_port() -> int:
    """Return a random port of this machine that nothing listens on now.

    A server may bind it minutes later. The kernel gives none of these ports to outgoing connections in between.

    Raises:
        RunError: all tries failed.

    Example:
        >>> import socket
        >>> from areal_core.processes import free_port
        >>> port = free_port()
        >>> with socket.create_server(("127.0.0.1", port)) as server:
        ...     server.getsockname()[1] == port
        True
    """
    choose = random.SystemRandom().choice  # random also if every process sets the same seed
    for _ in range(_TRIES):
        port = choose(_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("", port))
            return port
    raise RunError(
        f"no free port found on this machine in {_TRIES} tries between {_PORTS[0]} and {_PORTS[-1]}",
        hints=["see what listens there: ss --listening --tcp --numeric"],
    )


def http_address(host: str, port: int) -> str:
    """Return the URL of a server on a host, which is a name or an IPv4 or IPv6 address.

    Example:
        >>> from areal_core.processes import http_address
        >>> http_address("10.0.0.5", 8000), http_address("fe80::1", 8000)
        ('http://10.0.0.5:8000', 'http://[fe80::1]:8000')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def own_address() -> str:
    """Return the address by which this machine reaches other networks; loopback if it reaches none.

    Example:
        >>> import ipaddress
        >>> from areal_core.processes import own_address
        >>> ipaddress.ip_address(own_address()).is_unspecified
        False
    """
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(_OUTSIDE)  # sends nothing: the kernel only chooses an interface
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def is_loopback(address: str) -> bool:
    """Return whether an IP address reaches only this machine."""
    return ipaddress.ip_address(address).is_loopback


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IP address; an empty text if there is none."""
    if is_loopback(address):
        return "lo"
    wanted = ipaddress.ip_address(address)
    if wanted.version == 6:
        # A line of this file: the address in hexadecimal digits, four numbers, the name.
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(wanted.packed.hex()):
                return line.split()[-1]
        return ""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
