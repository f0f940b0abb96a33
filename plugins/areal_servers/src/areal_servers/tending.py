"""What is done for each server as long as the run lasts: bring it up, watch it, begin again when it was lost."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from areal_core.interfaces.inference import SamplingParameters
from areal_servers.checks import check_identity
from areal_servers.interface import (
    Piece,
    RequestRefusedError,
    ServerLostError,
    ServerRefusedError,
    UpdateRefusedError,
)
from areal_servers.member import State, known_form
from areal_servers.process import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.interfaces.model import ModelReference
    from areal_servers.fleet import ServerFleet
    from areal_servers.member import Member
    from areal_servers.settings import FleetSettings

HEALTH_INTERVAL_S = 0.5
LONGEST_PAUSE_S = 10.0
REVIVAL_S = 30.0
"""A process of the run that was ready before and does not come back within so long is started anew."""
_FAULTS = (ServerLostError, UpdateRefusedError, RequestRefusedError, OSError)


class Tending:
    """Tends the servers of a fleet, each in a task of its own.

    Args:
        fleet: told of what becomes of a server.
        settings: of the fleet.
        model: that the servers serve.
        description: the model's `config.json`.
    """

    def __init__(
        self, fleet: ServerFleet, settings: FleetSettings, model: ModelReference, description: Mapping[str, Any]
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self._model = model
        self._description = description

    async def tend(self, member: Member) -> None:
        """Until the server is gone for good."""
        starts = losses = 0
        while member.state not in (State.GONE, State.REFUSED):
            was_up = False
            try:
                if member.process is not None and not member.process.is_running:
                    starts += 1
                    if starts > 1 + self._settings.restarts:
                        raise ServerRefusedError(f"ended {starts - 1} times; {member.process.last_words()}")
                    await self._start_process(member)
                await self._bring_up(member)
                losses, was_up = 0, True
                await self._watch(member)
            except ServerRefusedError as error:
                self._fleet.move(member, State.REFUSED, str(error))
                if member.process is not None:
                    await member.process.end()
            except _FAULTS as error:
                self._fleet.lose(member, str(error))
                if member.process is not None and not was_up:
                    await member.process.end()  # it could not be brought up again; a new start may help
            if member.state is State.LOST:
                losses += 1
                await asyncio.sleep(min(LONGEST_PAUSE_S, 0.5 * 2**losses))

    async def _start_process(self, member: Member) -> None:
        assert member.process is not None
        port = free_port()
        member.connection.address = f"http://127.0.0.1:{port}"
        member.was_ready, member.has_memory = False, True
        await member.process.start(member.adapter.command(self._model, "127.0.0.1", port))

    async def _bring_up(self, member: Member) -> None:
        """From nothing known to ready: healthy, the right model, the current weights, and a first request answered."""
        is_new = member.process is not None and not member.was_ready
        if member.state is not State.STARTING:
            self._fleet.move(member, State.STARTING)
        await self._wait_until_healthy(member)
        member.identity = await member.adapter.identify(member.connection)
        check_identity(member.identity, self._model, self._description)
        self._fleet.move(member, State.CATCHING_UP)
        if is_new:
            await member.adapter.set_label(member.connection, "0")
            member.version = 0
        while True:
            current = self._fleet.current
            assert current is not None
            if member.version != current.version:
                if current.path is None:
                    self._fleet.miss()
                    await asyncio.sleep(HEALTH_INTERVAL_S)
                    continue
                try:
                    await member.catch_up(current, self._settings.update_timeout_s)
                except UpdateRefusedError:
                    if self._fleet.current is current:
                        raise
                    continue  # newer weights have taken the place of these
            await self._ask_first(member)
            async with self._fleet.updating:
                current = self._fleet.current
                if current is not None and current.version == member.version:
                    self._fleet.admit(member)
                    return

    async def _wait_until_healthy(self, member: Member) -> None:
        patience = REVIVAL_S if member.was_ready and member.process else self._settings.start_timeout_s
        deadline = time.monotonic() + patience
        while True:
            if member.process is not None and not member.process.is_running:
                if member.has_served:
                    raise ServerLostError(f"has ended: {member.process.last_words()}")
                if "address already in use" in member.process.last_words().lower():
                    raise ServerLostError("its port was taken meanwhile")
                raise ServerRefusedError(f"ended before it was ready; {member.process.last_words()}")
            try:
                await member.connection.get(member.adapter.health_path, self._settings.health_timeout_s)
            except RequestRefusedError as error:
                raise ServerRefusedError(f"answers something else than a server would: {error}") from None
            except ServerLostError as error:
                if time.monotonic() > deadline:
                    raise ServerLostError(f"was not healthy within {patience:g} s; {error}") from None
                await asyncio.sleep(HEALTH_INTERVAL_S)
            else:
                return

    async def _ask_first(self, member: Member) -> None:
        """A first request: a server may be healthy and yet unable to serve its model."""
        sampling = SamplingParameters(max_new_tokens=2)
        piece = Piece(f"first-{member.name}-{time.monotonic_ns()}", [1], sampling, 1, f"first-{member.version}")
        try:
            with known_form():
                async with asyncio.timeout(self._settings.update_timeout_s):
                    chunks = [chunk async for chunk in member.adapter.generate(member.connection, piece)]
        except (ServerLostError, TimeoutError) as error:
            words = str(error) or "no answer in time"
            await asyncio.sleep(HEALTH_INTERVAL_S)
            if member.has_served:
                raise ServerLostError(f"failed its first request: {words}") from None
            if member.process is not None:
                words = f"{words}; {member.process.last_words()}"
            else:  # one that went away just now may well be able to serve
                await member.connection.get(member.adapter.health_path, self._settings.health_timeout_s)
            raise ServerRefusedError(f"is healthy but cannot serve this model: {words}") from None
        logprobs = [value for chunk in chunks for value in chunk.logprobs]
        labels = {span[0] for chunk in chunks for span in chunk.spans or ()}
        if not logprobs or not all(math.isfinite(value) and value <= 0 for value in logprobs):
            raise ServerRefusedError(f"gives log-probabilities that are none: {logprobs}")
        if labels - {str(member.version)}:
            raise ServerLostError(f"labels its weights {', '.join(labels)} instead of {member.version}")

    async def _watch(self, member: Member) -> None:
        misses = 0
        while True:
            with suppress(TimeoutError):  # `wait_for` of Python 3.11 may swallow a cancellation
                async with asyncio.timeout(self._settings.health_interval_s):
                    await member.doubted.wait()
            member.doubted.clear()
            if member.state is State.LOST:
                return
            if member.state is State.LEAVING:
                await self._drain(member)
                return
            if member.process is not None and not member.process.is_running:
                raise ServerLostError(member.process.last_words())
            try:
                await member.connection.get(member.adapter.health_path, self._settings.health_timeout_s)
                misses = 0
            except (ServerLostError, RequestRefusedError) as error:
                misses += 1
                if misses == 2 or "Connect" in str(error):
                    raise

    def leave(self, member: Member) -> None:
        """The server is to be taken out: nothing further is asked of it."""
        if member.state in (State.READY, State.UPDATING):
            self._fleet.move(member, State.LEAVING)
            member.doubted.set()
        elif member.state not in (State.LEAVING, State.GONE):
            self._fleet.forget(member)

    async def _drain(self, member: Member) -> None:
        if not await member.wait_idle(self._settings.drain_timeout_s):
            with suppress(*_FAULTS):
                await member.adapter.abort(member.connection)
            await member.wait_idle(HEALTH_INTERVAL_S)
        self._fleet.move(member, State.GONE)
        await member.connection.close()
