"""The engine as the rollout controller sees it: starts the generating process and talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from areal_core.background import start_task
from areal_core.data import Generation
from areal_core.data.trajectory import FinishReason
from areal_core.errors import LostError, RunError
from areal_core.interfaces import InferenceCapabilities, SamplingParameters
from areal_core.interfaces.launcher import describe_exit
from areal_core.messages import Peer, PeerClosed, PeerCorrupt, private_folder, serve
from areal_hf.messages import (
    Begun,
    Cancel,
    Finished,
    Generate,
    Load,
    Loaded,
    NewRequest,
    NewSampling,
    Refused,
    Update,
    Updated,
)
from areal_hf.spawning import spawn
from areal_hf.stop_texts import cut_at_stop
from areal_planning.mixture import ROUTED_EXPERTS

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.interfaces import GenerationRequest, ModelReference, WeightUpdate
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
            tells_places=True,
        )
        self._cleanup = contextlib.ExitStack()
        self._folder = scratch or self._cleanup.enter_context(private_folder())
        self._member = member
        self._log = (log_dir or self._folder) / "hf.log"
        self._process: asyncio.subprocess.Process | None = None
        self._peer: Peer | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._limits = Loaded(0, 0, 0)
        self._numbers = 0
        self._generations: dict[int, asyncio.Future[Generation]] = {}
        self._waiting: dict[int, GenerationRequest] = {}
        self._updates: dict[int, asyncio.Future[str | None]] = {}
        self._sampling: dict[SamplingParameters, int] = {}
        self._unsent: list[NewRequest] = []
        self._ended: RunError | None = RunError("the embedded engine has not been started")
        self._model: ModelReference | None = None
        self._known_tokenizer: Any = None

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        self._model = model
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
            self._limits = await self._peer.receive()
        except PeerClosed:
            kind = RunError if self._member is None else PeerClosed
            raise kind(f"the embedded engine could not load {model.path}: {await self._last_words()}") from None
        self._ended = None
        self._receiving = start_task(self._receive(self._peer), "answers of the embedded engine")

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        if self._ended is not None:
            raise self._ended
        sampling = self._sampling_number(replace(request.sampling, stop=()))
        self._check(request)
        loop = asyncio.get_running_loop()
        self._numbers += 1
        number = self._numbers
        result: asyncio.Future[Generation] = loop.create_future()
        self._generations[number] = result
        self._waiting[number] = request
        if not self._unsent:
            # Siblings of a group are asked for in one turn of the loop; they travel in one message.
            loop.call_soon(self._send_requests)
        self._unsent.append(NewRequest(number, request.input_ids, sampling, request.seed, request.images))
        try:
            generation = await result
            stop = request.sampling.stop
            return cut_at_stop(generation, stop, self._tokenizer()) if stop else generation
        except asyncio.CancelledError:
            if self._generations.pop(number, None) is not None and self._ended is None:
                self._cancel(number)
            raise
        finally:
            self._waiting.pop(number, None)

    def _tokenizer(self) -> Any:
        """The model's; read when the first text that ends answers is asked for."""
        if self._known_tokenizer is None:
            from transformers import AutoTokenizer

            assert self._model is not None
            trusted = self._model.trust_remote_code
            self._known_tokenizer = AutoTokenizer.from_pretrained(self._model.path, trust_remote_code=trusted)
        return self._known_tokenizer

    def _cancel(self, number: int) -> None:
        unsent = [waiting for waiting in self._unsent if waiting.number != number]
        if len(unsent) < len(self._unsent):
            self._unsent = unsent
        elif self._peer is not None:
            with contextlib.suppress(PeerClosed):
                self._peer.notify(Cancel(number))

    def _send_requests(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._peer is not None:
            # A peer that has closed fails these requests where its end is noticed.
            with contextlib.suppress(PeerClosed):
                self._peer.notify(Generate(unsent))

    def _check(self, request: GenerationRequest) -> None:
        limits = self._limits
        request.check(limits.vocabulary, limits.sequence_length, "the longest sequence is")
        request.check(limits.vocabulary, limits.cache_tokens, "cache_gib has room for")

    def _sampling_number(self, sampling: SamplingParameters) -> int:
        """Sampling settings are checked and sent once, and referred to by number."""
        number = self._sampling.get(sampling)
        if number is None:
            check_sampling(sampling)
            number = self._sampling[sampling] = len(self._sampling)
            assert self._peer is not None
            with contextlib.suppress(PeerClosed):
                self._peer.notify(NewSampling(sampling))
        return number

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
        pending: list[asyncio.Future[Any]] = [*self._generations.values(), *self._updates.values()]
        for future in pending:
            future.cancel()
        self._generations.clear()
        self._cleanup.close()

    async def _receive(self, peer: Peer) -> None:
        reason = "has died"
        try:
            while True:
                message = await peer.receive()
                if isinstance(message, Finished):
                    self._finish(message)
                elif isinstance(message, Begun):
                    self._begin(message)
                elif isinstance(message, Refused):
                    self._refuse(message)
                elif isinstance(message, Updated):
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

    def _begin(self, message: Begun) -> None:
        for number in message.numbers:
            if request := self._waiting.pop(number, None):
                request.on_place(True)

    def _refuse(self, message: Refused) -> None:
        future = self._generations.pop(message.number, None)
        if future is not None and not future.done():
            future.set_exception(ValueError(message.text))

    def _finish(self, message: Finished) -> None:
        counts = message.counts
        size = 4 * sum(counts)
        view = memoryview(message.columns)
        tokens = view[:size].cast("i").tolist()
        versions = view[size : 2 * size].cast("i").tolist()
        logprobs = cast("list[float]", view[2 * size : 3 * size].cast("f").tolist())
        columns = (
            self._columns(message.computed, view[3 * size :]) if self._limits.experts_shape else [{}] * len(counts)
        )
        start = 0
        for number, count, stopped, told in zip(message.numbers, counts, message.stopped, columns, strict=True):
            future = self._generations.pop(number, None)
            end = start + count
            if future is not None and not future.done():
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                lists = tokens[start:end], logprobs[start:end], versions[start:end]
                future.set_result(Generation(*lists, reason, told))
            start = end

    def _columns(self, computed: list[int], data: memoryview) -> list[dict[str, torch.Tensor]]:
        """Of each generation, the experts by which its tokens were predicted; nothing predicts the first. Empty where
        they are not told."""
        if not self._limits.experts_shape:
            return []
        shape, dtype = self._limits.experts_shape, getattr(torch, self._limits.experts_dtype)
        told = torch.frombuffer(bytearray(data), dtype=dtype).view(-1, *shape)
        first = torch.zeros(1, *shape, dtype=dtype)
        return [{ROUTED_EXPERTS: torch.cat([first, each])} for each in torch.split(told, computed)]

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
        words = "\n".join(self._log.read_text(errors="replace")[-4000:].splitlines()[-15:])
        return f"it {describe_exit(self._process.returncode)}; the end of its log:\n{words}"

    async def _fail(self, reason: str) -> None:
        """End the process where it still runs, and everything that waits for it."""
        kind = LostError if self._member is None else PeerClosed  # of its own process the driver tells how it ended
        self._ended = kind(f"the embedded engine {reason}: {await self._last_words()}")
        pending: list[asyncio.Future[Any]] = [*self._generations.values(), *self._updates.values()]
        self._generations.clear()
        for future in pending:
            if not future.done():
                future.set_exception(self._ended)


def check_sampling(sampling: SamplingParameters) -> None:
    """Refuse what this engine cannot honour.

    Raises:
        ValueError: a setting is out of range, or one that is not implemented is switched on.
    """
    if asked := sampling.unsupported():
        raise ValueError(f"the embedded engine does not support the sampling settings {', '.join(asked)}")
    sampling.check()
