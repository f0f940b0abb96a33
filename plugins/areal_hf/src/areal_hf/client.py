"""The engine as the rollout controller sees it: starts the generating process and talks to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from areal_core.data.trajectory import FinishReason
from areal_core.errors import RunError
from areal_core.interfaces import Generation, InferenceCapabilities, SamplingParameters
from areal_core.launchers.processes import exit_description, last_lines
from areal_core.messages.channel import Channel, ChannelClosed, Message, private_socket_path, serve

if TYPE_CHECKING:
    from areal_core.interfaces import GenerationRequest, ModelReference, WeightUpdate
    from areal_hf.config import HFConfig

_HONOURED = {"temperature", "max_new_tokens", "min_new_tokens", "stop_token_ids", "greedy"}
_DEATH_GRACE_S = 0.5
"""How long a process whose channel has closed may take to end by itself, so that its exit code can be told."""


class HFEngine:
    """An `InferenceEngine` whose model runs in a child process.

    Args:
        settings: of the plugin.
        scratch: private folder for the socket; without one it is made.
        log_dir: where the process writes `hf.log`; without one it is kept with the socket.
        deterministic: one request at a time, as if the settings said so.
    """

    def __init__(
        self,
        settings: HFConfig,
        scratch: Path | None = None,
        log_dir: Path | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._settings = settings.model_copy(update={"deterministic": settings.deterministic or deterministic})
        self.capabilities = InferenceCapabilities(
            frozenset({"keep_cache", "recompute"}), deterministic=self._settings.deterministic
        )
        self._scratch = scratch
        self._log_dir = log_dir
        self._log = Path(os.devnull)
        self._cleanup = contextlib.ExitStack()
        self._process: asyncio.subprocess.Process | None = None
        self._channel: Channel | None = None
        self._receiving: asyncio.Task[None] | None = None
        self._limits: dict[str, int] = {}
        self._numbers = 0
        self._generations: dict[int, asyncio.Future[Generation]] = {}
        self._updates: dict[int, asyncio.Future[str | None]] = {}
        self._sampling: dict[SamplingParameters, int] = {}
        self._unsent: list[tuple[int, list[int], int, int]] = []
        self._ended: RunError | None = RunError("the embedded engine has not been started")

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        socket = self._cleanup.enter_context(private_socket_path())
        if self._scratch is not None:
            socket = Path(self._scratch) / f"hf-{id(self):x}.sock"
            self._cleanup.callback(socket.unlink, missing_ok=True)
        log_dir = Path(self._log_dir or socket.parent)
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log = log_dir / "hf.log"
        try:
            async with asyncio.timeout(self._settings.start_timeout_s):
                await self._start(socket, model)
        except TimeoutError:
            await self.close()
            raise RunError(
                f"the embedded engine did not load {model.path} within start_timeout_s = "
                f"{self._settings.start_timeout_s:g}; the end of its log:\n{last_lines(self._log)}"
            ) from None
        except BaseException:
            await self.close()
            raise

    async def _start(self, socket: Path, model: ModelReference) -> None:
        connected: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
        finished = asyncio.Event()

        async def accept(channel: Channel) -> None:
            if connected.done():
                return
            connected.set_result(channel)
            await finished.wait()

        self._cleanup.callback(finished.set)
        server = await serve(socket, accept)
        self._cleanup.callback(server.close)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)}
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "areal_hf.server", str(socket), str(os.getpid()),
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        exited: asyncio.Future[Any] = asyncio.ensure_future(self._process.wait())
        waited: set[asyncio.Future[Any]] = {connected, exited}
        try:
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
        if not connected.done():
            raise RunError(f"the embedded engine could not start with {model.path}: {self._last_words()}")
        self._channel = connected.result()
        settings = self._settings.model_dump(mode="json")
        try:
            self._channel.post(Message("start", {"settings": settings, "model": asdict(model)}))
            ready = await self._channel.receive()
        except ChannelClosed:
            await self._process.wait()
            raise RunError(f"the embedded engine could not load {model.path}: {self._last_words()}") from None
        self._limits = ready.fields
        self._ended = None
        self._receiving = asyncio.create_task(self._receive(self._channel))

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        if self._ended is not None:
            raise self._ended
        sampling = self._sampling_number(request.sampling)
        self._check(request)
        loop = asyncio.get_running_loop()
        self._numbers += 1
        number = self._numbers
        result: asyncio.Future[Generation] = loop.create_future()
        self._generations[number] = result
        if not self._unsent:
            # Siblings of a group are asked for in one turn of the loop; they travel in one message.
            loop.call_soon(self._send_requests)
        self._unsent.append((number, request.input_ids, sampling, request.seed))
        try:
            return await result
        except asyncio.CancelledError:
            if self._generations.pop(number, None) is not None and self._ended is None:
                self._cancel(number)
            raise

    def _cancel(self, number: int) -> None:
        unsent = [waiting for waiting in self._unsent if waiting[0] != number]
        if len(unsent) < len(self._unsent):
            self._unsent = unsent
        elif self._channel is not None:
            with contextlib.suppress(ChannelClosed):
                self._channel.post(Message("cancel", {"number": number}))

    def _send_requests(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._channel is not None:
            # A channel that has closed fails these requests where its end is noticed.
            with contextlib.suppress(ChannelClosed):
                self._channel.post(Message("generate", {"requests": unsent}))

    def _check(self, request: GenerationRequest) -> None:
        prompt, new = len(request.input_ids), request.sampling.max_new_tokens
        if not prompt:
            raise ValueError(f"request {request.request_id} has no input tokens")
        if min(request.input_ids) < 0 or max(request.input_ids) >= self._limits["vocabulary"]:
            raise ValueError(
                f"request {request.request_id} has token {max(request.input_ids, key=abs)}, the model's vocabulary "
                f"has {self._limits['vocabulary']} tokens"
            )
        for name, limit in (
            ("sequence_length", self._limits["sequence_length"]),
            ("cache_tokens", self._limits["cache_tokens"]),
        ):
            if prompt + new > limit:
                what = "the longest sequence is" if name == "sequence_length" else "cache_gib has room for"
                raise ValueError(
                    f"request {request.request_id} wants {prompt + new} tokens ({prompt} of prompt and "
                    f"{new} new ones), but {what} {limit} tokens"
                )

    def _sampling_number(self, sampling: SamplingParameters) -> int:
        """Sampling settings are checked and sent once, and referred to by number."""
        number = self._sampling.get(sampling)
        if number is None:
            check_sampling(sampling)
            number = self._sampling[sampling] = len(self._sampling)
            assert self._channel is not None
            self._channel.post(Message("sampling", asdict(sampling)))
        return number

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """See `InferenceEngine.generate_everywhere`: there is one copy."""
        return [await self.generate(request)]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`."""
        if self._ended is not None:
            raise self._ended
        assert self._channel is not None
        if update.version in self._updates:
            raise RunError(f"weights of version {update.version} are being taken over already")
        result: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._updates[update.version] = result
        self._channel.post(Message("update", {"version": update.version, "path": str(update.path)}))
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
        if self._channel is not None:
            await self._channel.close()
        await self._kill()
        pending: list[asyncio.Future[Any]] = [*self._generations.values(), *self._updates.values()]
        for future in pending:
            future.cancel()
        self._generations.clear()
        self._cleanup.close()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()

    async def _receive(self, channel: Channel) -> None:
        reason = "has died"
        try:
            while True:
                message = await channel.receive()
                if message.kind == "finished":
                    self._finish(message)
                elif message.kind == "updated":
                    update = self._updates.get(message.fields["version"])
                    if update is not None and not update.done():
                        update.set_result(message.fields["error"])
        except ChannelClosed:
            pass
        except (LookupError, TypeError, ValueError) as error:
            reason = f"sent an answer that makes no sense ({error!r})"
        await self._fail(reason)

    def _finish(self, message: Message) -> None:
        counts = message.fields["counts"]
        size = 4 * sum(counts)
        view = memoryview(message.payload)
        tokens = view[:size].cast("i").tolist()
        versions = view[size : 2 * size].cast("i").tolist()
        logprobs = cast("list[float]", view[2 * size :].cast("f").tolist())
        start = 0
        for number, count, stopped in zip(message.fields["numbers"], counts, message.fields["stopped"], strict=True):
            future = self._generations.pop(number, None)
            end = start + count
            if future is not None and not future.done():
                reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                future.set_result(Generation(tokens[start:end], logprobs[start:end], versions[start:end], reason))
            start = end

    async def _fail(self, reason: str) -> None:
        """End the process where it still runs, and everything that waits for it."""
        if self._process is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _DEATH_GRACE_S)
        await self._kill()
        self._ended = RunError(f"the embedded engine {reason}: {self._last_words()}", hints=[f"its log: {self._log}"])
        pending: list[asyncio.Future[Any]] = [*self._generations.values(), *self._updates.values()]
        self._generations.clear()
        for future in pending:
            if not future.done():
                future.set_exception(self._ended)

    def _last_words(self) -> str:
        code = None if self._process is None else self._process.returncode
        how = "it runs still" if code is None else exit_description(code)
        return f"{how}; the end of its log:\n{last_lines(self._log)}"


def check_sampling(sampling: SamplingParameters) -> None:
    """Refuse what this engine cannot honour.

    Raises:
        ValueError: a setting is out of range, or one that is not implemented is switched on.
    """
    asked = [
        spec.name
        for spec in fields(SamplingParameters)
        if spec.name not in _HONOURED and getattr(sampling, spec.name) != spec.default
    ]
    if asked:
        raise ValueError(f"the embedded engine does not support the sampling settings {', '.join(asked)}")
    if not 0 < sampling.temperature < float("inf"):
        raise ValueError(f"temperature is {sampling.temperature}, it must be a finite number above 0")
    if sampling.max_new_tokens < 1 or not 0 <= sampling.min_new_tokens <= sampling.max_new_tokens:
        raise ValueError(
            f"max_new_tokens is {sampling.max_new_tokens} and min_new_tokens {sampling.min_new_tokens}; "
            "at least one token is generated, and at most max_new_tokens"
        )
