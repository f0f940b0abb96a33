"""One server of a fleet: where it is in its life, what it works on, and how it takes over weights."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING

from areal_servers.answer import PieceTokens
from areal_servers.interface import ServerLostError, UpdateRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.interfaces.inference import UpdateMode, WeightUpdate
    from areal_servers.answer import Answer
    from areal_servers.connection import ServerConnection
    from areal_servers.interface import ServerAdapter, ServerIdentity, WeightGroup
    from areal_servers.process import ServerProcess

ABORT_INTERVAL_S = 0.02


@contextmanager
def known_form() -> Iterator[None]:
    """An answer that is JSON and yet of another form than the server's own is a fault of the server."""
    try:
        yield
    except (LookupError, TypeError, AttributeError) as error:
        raise ServerLostError(f"answered in a form that is not known: {error!r:.200}") from error


class State(StrEnum):
    """Where a server is in its life. Only a ready one is given requests."""

    STARTING = "starting"
    CATCHING_UP = "catching up"
    READY = "ready"
    UPDATING = "updating"
    LEAVING = "leaving"
    LOST = "lost"
    REFUSED = "refused"
    GONE = "gone"


class Member:
    """One server.

    Args:
        name: in logs and the live view.
        adapter: speaks its language.
        connection: to it.
        mode: what becomes of live requests' keys and values at an update.
        process: where the run started it itself.

    Attributes:
        identity: what it said of itself, None before.
        version: of its weights; -1 while that is not known.
        requests: under way there.
        failures: of requests in a row.
        group: the broadcast group that it is in.
        was_ready: since its process began, or since it was first seen.
        has_served: whether it, or a process before it, was ready ever: what fails then is no fault of the config.
        has_memory: False after it gave its GPU's memory away, until the next update.
    """

    def __init__(
        self,
        name: str,
        adapter: ServerAdapter,
        connection: ServerConnection,
        mode: UpdateMode,
        process: ServerProcess | None = None,
    ) -> None:
        self.name = name
        self.adapter = adapter
        self.connection = connection
        self.process = process
        self.state = State.STARTING
        self.identity: ServerIdentity | None = None
        self.version = -1
        self.requests = 0
        self.failures = 0
        self.group: WeightGroup | None = None
        self.was_ready = False
        self.has_served = False
        self.has_memory = True
        self.doubted = asyncio.Event()
        self._mode = mode
        self._idle = asyncio.Event()

    @property
    def reports_spans(self) -> bool:
        """Whether the server labels tokens itself."""
        return self.identity is not None and self.identity.reports_spans

    def take(self) -> None:
        """One request more."""
        self.requests += 1
        self._idle.clear()

    def release(self) -> None:
        """One request less."""
        self.requests -= 1
        if not self.requests:
            self._idle.set()

    async def work(self, answer: Answer) -> None:
        """Ask for the rest of an answer and keep what comes, with labels; it may end before the answer is complete.

        Raises:
            ServerLostError: the server failed; the tokens whose version is certain are kept.
            RequestRefusedError: the server says that the request is wrong.
        """
        version = self.version
        tokens = PieceTokens(version)
        piece = answer.next_piece(version, keeps_cache=self._mode == "keep_cache")
        try:
            with known_form():
                async with aclosing(self.adapter.generate(self.connection, piece)) as chunks:  # type: ignore[type-var]
                    async for chunk in chunks:
                        undisturbed = self.state is not State.UPDATING and self.version == version
                        tokens.add(chunk, is_certain=undisturbed or not self.reports_spans)
            versions = tokens.versions(needs_spans=self.reports_spans)
        except ServerLostError:
            answer.keep(tokens.without_end(), tokens.certain, [version] * tokens.certain)
            raise
        answer.keep(tokens, len(versions), versions)

    async def update(self, update: WeightUpdate, timeout_s: float) -> dict[str, float]:
        """Change the weights under the requests that it works on.

        Returns:
            Seconds to stop, to transfer and to resume.

        Raises:
            ServerLostError, UpdateRefusedError: it does not hold the new weights for sure.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._halt()
                stopped = time.monotonic()
                await self._restore_memory()
                await self._take_over(update)
                transferred = time.monotonic()
                if self.reports_spans:
                    await self.adapter.resume(self.connection)
        except TimeoutError:
            raise ServerLostError(f"did not take over weights within update_timeout_s = {timeout_s:g}") from None
        self.version = update.version
        ended = time.monotonic()
        return {"stop_s": stopped - began, "transfer_s": transferred - stopped, "resume_s": ended - transferred}

    async def catch_up(self, update: WeightUpdate, timeout_s: float) -> None:
        """Take over weights while nothing is asked of it; whatever it was doing before is ended. Raises as `update`."""
        assert update.path is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._restore_memory()
                await self.adapter.resume(self.connection)  # an update that broke off may have left it stopped
                await self.adapter.abort(self.connection)
                await self.adapter.stop(self.connection, "recompute")
                with known_form():
                    await self.adapter.load(self.connection, update.path, str(update.version), "recompute")
                await self.adapter.resume(self.connection)
        except TimeoutError:
            raise ServerLostError(f"did not take over weights within update_timeout_s = {timeout_s:g}") from None
        self.version = update.version

    async def release_memory(self) -> None:
        """End its requests, which keep their tokens, and let it give its memory away until the next update."""
        while self.requests:
            await self.adapter.abort(self.connection)
            await self.wait_idle(ABORT_INTERVAL_S)
        await self.adapter.release_memory(self.connection)
        self.has_memory = False

    async def _restore_memory(self) -> None:
        if not self.has_memory:
            await self.adapter.restore_memory(self.connection)
            self.has_memory = True

    async def _halt(self) -> None:
        if self.reports_spans:
            await self.adapter.stop(self.connection, self._mode)
            return
        # No piece may be under way when weights change, for its tokens could not be told apart.
        while self.requests:
            await self.adapter.abort(self.connection)
            await self.wait_idle(ABORT_INTERVAL_S)

    async def _take_over(self, update: WeightUpdate) -> None:
        label = str(update.version)
        with known_form():
            if update.path is not None:
                await self.adapter.load(self.connection, update.path, label, self._mode)
            elif self.group is None:
                raise UpdateRefusedError("is not in the group in which the weights are broadcast")
            else:
                await self.adapter.receive(self.connection, self.group, update.tensors, label, self._mode)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether its requests have ended within so many seconds."""
        if self.requests:
            self._idle.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._idle.wait()
            except TimeoutError:
                return False
        return True
