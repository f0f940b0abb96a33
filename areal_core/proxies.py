"""Proxy variables never apply to a run's own addresses: requests to this machine go straight to it.

`HTTP_PROXY` and `HTTPS_PROXY` are inherited by every process of a run, and most HTTP clients obey them, also for
127.0.0.1. `bypass_proxies` adds the run's own addresses to `NO_PROXY`. It is called where a process joins a run, where
the `areal` command starts, and where either builds the environment of another program.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, MutableMapping

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
"""Names of this machine. Not `[::1]`: httpx fails at a NO_PROXY that holds brackets."""
VARIABLES: Final = ("NO_PROXY", "no_proxy")
"""Some clients read the one and some the other, so both are written."""


def bypass_proxies(environment: MutableMapping[str, str] | None = None, hosts: Iterable[str] = ()) -> None:
    """Add this machine and further hosts to the addresses that no proxy is used for. What is there already stays.

    Args:
        environment: to be changed; by default that of this process.
        hosts: names or addresses, such as the one on which a server of the run listens.

    Example:
        >>> variables = {"no_proxy": "intranet"}
        >>> bypass_proxies(variables, ["10.0.0.5"])
        >>> variables["NO_PROXY"]
        'intranet,localhost,127.0.0.1,::1,10.0.0.5'
    """
    environment = os.environ if environment is None else environment
    listed = [entry.strip() for name in VARIABLES for entry in environment.get(name, "").split(",")]
    if "*" in listed:  # no proxy for anything; some clients understand it only alone
        listed, hosts = ["*"], ()
    else:
        listed += [*LOOPBACK, *(host.strip("[]") for host in hosts)]
    for name in VARIABLES:
        environment[name] = ",".join(dict.fromkeys(filter(None, listed)))
