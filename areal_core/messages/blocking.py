"""One end of a connection for a program, or a thread, without an event loop."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections import deque
from typing import Any

from areal_core.messages.codec import ChannelClosed, Frame, FrameDecoder, encode_frame
from areal_core.messages.credentials import Credentials, Hello

RETRY_S = 0.02


class BlockingChannel:
    """Sends from any thread; one thread receives.

    Args:
        connected: a socket whose other end speaks the same protocol.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._decoder = FrameDecoder()
        self._received: deque[Frame] = deque()
        self._numbers = itertools.count(1)
        self._sending = threading.Lock()

    @classmethod
    def connect(
        cls,
        address: str,
        timeout_s: float,
        name: str = "",
        credentials: Credentials | None = None,
        *,
        is_patient: bool = True,
    ) -> BlockingChannel:
        """Connect and say hello; see `areal_core.messages.connect`.

        Args:
            address, timeout_s, name, credentials: as there.
            is_patient: whether an address that nobody serves yet is tried again.

        Raises:
            TimeoutError: nobody serves the address within `timeout_s` seconds.
        """
        deadline = time.monotonic() + timeout_s
        scheme, _, place = address.partition(":")
        host, _, port = place.rpartition(":")
        while True:
            own = socket.socket(socket.AF_UNIX if scheme == "unix" else socket.AF_INET)
            own.settimeout(max(RETRY_S, deadline - time.monotonic()))
            try:
                own.connect(place if scheme == "unix" else (host, int(port)))
            except (FileNotFoundError, ConnectionError, TimeoutError):
                own.close()
                if not is_patient or time.monotonic() > deadline:
                    raise TimeoutError(f"nobody listens on {address} after {timeout_s:g} s") from None
                time.sleep(RETRY_S)
            else:
                channel = cls(own)
                shown = credentials or Credentials.from_environment()
                channel.send(Hello(shown.token, shown.epoch, name))
                return channel

    @property
    def own_host(self) -> str:
        """See `Channel.own_host`."""
        name = self._socket.getsockname()
        return str(name[0]) if isinstance(name, tuple) else "127.0.0.1"

    def send(self, message: Any, number: int = 0, timeout_s: float | None = None) -> None:
        """Write a message whole.

        Raises:
            ChannelClosed: the peer is gone.
            TimeoutError: the peer did not read for `timeout_s` seconds; the channel can no longer be used.
        """
        pieces = encode_frame(message, number)
        with self._sending:
            self._socket.settimeout(timeout_s)
            try:
                for piece in pieces:
                    self._socket.sendall(piece)
            except TimeoutError:
                self.close()
                raise
            except OSError as error:
                raise ChannelClosed(f"the peer closed the channel ({error})") from None

    def send_request(self, message: Any) -> int:
        """Write a message that is answered; its reply arrives with this number, negated."""
        number = next(self._numbers)
        self.send(message, number)
        return number

    def receive(self, timeout_s: float | None = None) -> Frame:
        """The next message, with its number.

        Raises:
            ChannelClosed: the peer is gone and everything that it had sent was received.
            TimeoutError: nothing came within `timeout_s` seconds; the channel can still be used.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._received:
            remaining = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                data = self._read(remaining)
            except (TimeoutError, BlockingIOError):
                raise TimeoutError(f"no message after {timeout_s or 0:g} s") from None
            except OSError as error:
                raise ChannelClosed(f"the peer closed the channel ({error})") from None
            if not data:
                raise ChannelClosed("the peer closed the channel")
            self._received.extend(self._decoder.feed(data))
        return self._received.popleft()

    def _read(self, timeout_s: float | None) -> bytes:
        # Not by the socket's own time-out, which a sending thread sets too.
        import select

        if timeout_s is not None and not select.select([self._socket], [], [], timeout_s)[0]:
            raise TimeoutError
        return self._socket.recv(1 << 20)

    def close(self) -> None:
        """Close; safe to call twice."""
        self._socket.close()
