"""A mark for what needs the loopback address of IPv6, which containers often lack."""

import socket
from contextlib import suppress

import pytest

has_ipv6 = False
with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    has_ipv6 = True

NEEDS_IPV6 = pytest.mark.skipif(not has_ipv6, reason="this machine has no address ::1")
