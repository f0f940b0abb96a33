"""The engine as the rollout controller sees it: has the generating process load a model and take over weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import LostError, RunError
from areal_core.interfaces import Grant, InferenceCapabilities, SlotQueue
from areal_core.interfaces.launcher import describe_exit
from areal_core.launchers.guard import last_words
from areal_core.messages import Peer, PeerClosed, PeerCorrupt, private_folder, serve
from areal_hf.client import HFClient
from areal_hf.messages import (
    Load,
    Loaded,
    Update,
    Updated,
)
from areal_hf.spawning import spawn

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.data import Generation
    from areal_core.interfaces import GenerationRequest, ModelReference, Slots, WeightUpdate
    from areal_core.runs import Member
    from areal_hf.config import HFConfig

ENGINE = "hf"
"""What the engine announces its address for the generating process as."""
_DEATH_GRACE_S = 5.0
"""How long a process whose peer has closed may take to end by itself, so that its exit code can be told."""


class HFEngine:
    """An `InferenceEngine` whose model runs in a child process.

    Args:
        settings: of the plugin.
        scratch: private folder for the socket; without one it is made.
        member: of the run, whose driver starts the generating process; without it this program does.
        log_dir: where the process writes `hf.log` if this program starts it; else beside the socket.
        deterministic: one request at a time, as if the settings said so.
    """

    def __init__(
        self,
        settings: HFConfig,
        scratch: Path | None = None,
        member: Member | None = None,
        log_dir: Path | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._settings = settings.model_copy(update={"deterministic": settings.deterministic or deterministic})
        self.capabilities = InferenceCapabilities(
            frozenset({"keep_cache", "recompute"}),
            frozenset({"stop"}),
            deterministic=self._settings.deterministic,
            images=True,
        )
        self._cleanup = contextlib.ExitStack()
        self._folder = scratch or self._cleanup.enter_context(private_folder())
        self._member = member
        self._log = (log_dir or self._folder) / "hf.log"
        self._process: asyncio.subprocess.Process | None = None
        self._peer: Peer | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._slots = SlotQueue()
        self.acquire, self.release = self._slots.acquire, self._slots.release
        self._client: HFClient | None = None
        self._updates: dict[int, asyncio.Future[str | None]] = {}
        self._ended: RunError | None = RunError("the embedded engine has not been started")

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start(model)
        except TimeoutError:
            await self.close()
            raise RunError(
                f"the embedded engine did not load {model.path} within start_timeout_s = "
                f"{self._settings.start_timeout_s:g}; its log says what it was doing"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _start(self, model: ModelReference) -> None:
        connected: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        finished = asyncio.Event()

        async def accept(peer: Peer) -> None:
            if connected.done():
                return
            connected.set_result(peer)
            await finished.wait()

        self._cleanup.callback(finished.set)
        server = await serve(f"unix:{self._folder / f'hf-{id(self):x}.sock'}", accept)
        self._cleanup.callback(server.close)
        exited: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._member is not None:
            self._member.announce(ENGINE, server.address)  # the process that the driver has started asks for it
        else:
            self._process = await spawn(server.address, self._log, self._settings.threads)
            exited = asyncio.ensure_future(self._process.wait())
        waited: set[asyncio.Future[Any]] = {connected, exited}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not connected.done():
            raise RunError(f"the embedded engine could not start with {model.path}: {await self._last_words()}")
        self._peer = connected.result()
        try:
            self._peer.notify(Load(self._settings.model_dump_json(), model))
            loaded: Loaded = await self._peer.receive()
        except PeerClosed:
            kind = RunError if self._member is None else PeerClosed
            raise kind(f"the embedded engine could not load {model.path}: {await self._last_words()}") from None
        self._ended = None
        self._client = self.client(self, model)
        grant = Grant(
            "hf",
            loaded.address,
            0,
            "",
            labels_tokens=True,
            context=loaded.sequence_length,
            vocabulary=loaded.vocabulary,
        )
        self._slots.open(grant, 1 if self._settings.deterministic else self._settings.max_concurrent_requests)
        self._receiving = start_task(self._receive(self._peer), "answers of the embedded engine")

    def client(self, slots: Slots, model: ModelReference) -> HFClient:
        """See `InferenceEngine.client`."""
        return HFClient(self._settings, self.capabilities, slots, model)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        if self._client is None:
            raise self._ended or RunError("the embedded engine has not been started")
        return await self._client.generate(request)

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """See `InferenceEngine.generate_everywhere`: there is one copy."""
        return [await self.generate(request)]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`."""
        if self._ended is not None:
            raise self._ended
        assert self._peer is not None
        assert update.path is not None, "it receives no broadcast"
        if update.version in self._updates:
            raise RunError(f"weights of version {update.version} are being taken over already")
        result: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._updates[update.version] = result
        with contextlib.suppress(PeerClosed):  # the end of the engine fails this request, with its cause
            self._peer.notify(Update(update.version, update.path))
        try:
            async with asyncio.timeout(self._settings.update_timeout_s):
                error = await result
        except TimeoutError:
            # Whether it will still take them over is unknown, so it must not generate any further.
            await self._fail(f"did not take over weights within {self._settings.update_timeout_s:g} s")
            assert self._ended is not None
            raise self._ended from None
        finally:
            self._updates.pop(update.version, None)
        if error is not None:
            raise RunError(f"weights of version {update.version} were refused: {error}")

    def describe(self) -> str:
        """See `InferenceEngine.describe`."""
        return ""

    def take_metrics(self) -> dict[str, float]:
        """See `InferenceEngine.take_metrics`."""
        return {}

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        if self._ended is None:
            self._ended = RunError("the embedded engine was closed")
        if self._receiving is not None:
            self._receiving.cancel()
        if self._peer is not None:
            await self._peer.close()
        await self._end_process()
        self._slots.fail(self._ended)
        if self._client is not None:
            await self._client.close()
        for update in self._updates.values():
            update.cancel()
        self._cleanup.close()

    async def _receive(self, peer: Peer) -> None:
        reason = "has died"
        try:
            while True:
                message = await peer.receive()
                if isinstance(message, Updated):
                    update = self._updates.get(message.version)
                    if update is not None and not update.done():
                        update.set_result(message.error)
        except PeerCorrupt as error:
            reason = f"sent an answer that makes no sense ({error.message})"
        except PeerClosed:
            pass
        except (LookupError, TypeError, ValueError) as error:
            reason = f"sent an answer that makes no sense ({error!r})"
        await self._fail(reason)

    async def _end_process(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    async def _last_words(self) -> str:
        """How the process ends: by itself where it was about to, and what it wrote last."""
        if self._process is None:
            return "its log, hf.log, says why"
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _DEATH_GRACE_S)
        await self._end_process()
        return f"it {describe_exit(self._process.returncode)}; the end of its log:\n{last_words(self._log)}"

    async def _fail(self, reason: str) -> None:
        """End the process where it still runs, and everything that waits for it."""
        kind = LostError if self._member is None else PeerClosed  # of its own process the driver tells how it ended
        self._ended = kind(f"the embedded engine {reason}: {await self._last_words()}")
        for update in self._updates.values():
            if not update.done():
                update.set_exception(self._ended)
        if self._member is None:
            self._slots.fail(self._ended)
        else:  # the run is about to end
            self._slots.open(None, 0)
