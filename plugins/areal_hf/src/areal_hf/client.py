"""The engine as the rollout controller sees it: starts the generating process and talks to it."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.data import FinishReason
from areal_core.errors import RunError
from areal_core.interfaces import Generation, InferenceCapabilities
from areal_core.processes import exit_description, last_lines
from areal_core.rollout.channel import Channel, ChannelClosed, Message, serve

if TYPE_CHECKING:
    from areal_hf.config import HFSettings

    from areal_core.interfaces import GenerationRequest, ModelReference, SamplingParameters, WeightUpdate


class HFEngine:
    """An `InferenceEngine` whose model runs in a child process.

    Args:
        settings: of the plugin.
        scratch: private folder for the socket.
        log_dir: where the process writes `hf.log`.
        deterministic: one request at a time, so that no sequence's numbers depend on what else is in the batch.
    """

    capabilities = InferenceCapabilities(frozenset({"keep_cache", "recompute"}), deterministic=True)

    def __init__(self, settings: HFSettings, scratch: Path, log_dir: Path, *, deterministic: bool = False) -> None:
        self._settings = settings
        self._socket = Path(scratch) / "hf.sock"
        self._log = Path(log_dir) / "hf.log"
        self._rows = 1 if deterministic else settings.max_concurrent_requests
        self._channel: Channel | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._generations: dict[str, asyncio.Future[Generation]] = {}
        self._updates: dict[int, asyncio.Future[None]] = {}
        self._sampling: dict[SamplingParameters, int] = {}
        self._receiving: asyncio.Task[None] | None = None
        self._dead: RunError | None = None
        self._is_closing = False

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        self._ended = asyncio.Event()

        async def accept(channel: Channel) -> None:
            self._channel = channel
            settings = self._settings.model_dump(mode="json") | {"max_concurrent_requests": self._rows}
            channel.send(Message("start", settings | asdict(model)))
            with suppress(ChannelClosed):
                await channel.receive()
                ready.set_result(None)
                await self._ended.wait()

        server = await serve(self._socket, accept)
        environment = {**os.environ, "OMP_NUM_THREADS": str(self._settings.threads)}
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "areal_hf.server", str(self._socket), str(os.getpid()),
                env=environment, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        exited = asyncio.ensure_future(self._process.wait())
        await asyncio.wait(
            {ready, exited}, timeout=self._settings.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        exited.cancel()
        server.close()
        if not ready.done():
            await self._kill()
            raise RunError(f"the embedded engine did not start with the model {model.path}; {self._last_words()}")
        self._receiving = loop.create_task(self._receive())

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        if self._dead is not None:
            raise self._dead
        assert self._channel is not None
        name = request.request_id
        result: asyncio.Future[Generation] = asyncio.get_running_loop().create_future()
        self._generations[name] = result
        fields = {
            "id": name,
            "input_ids": request.input_ids,
            "sampling": self._sampling_id(request.sampling),
            "seed": request.seed,
        }
        self._channel.send(Message("generate", fields))
        try:
            return await result
        except asyncio.CancelledError:
            if self._generations.pop(name, None) is not None:
                self._channel.send(Message("cancel", {"id": name}))
            raise

    def _sampling_id(self, sampling: SamplingParameters) -> int:
        """Sampling settings are sent once and referred to by number."""
        if sampling not in self._sampling:
            assert self._channel is not None
            self._sampling[sampling] = len(self._sampling)
            self._channel.send(Message("sampling", {"id": self._sampling[sampling], "values": asdict(sampling)}))
        return self._sampling[sampling]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`."""
        if self._dead is not None:
            raise self._dead
        assert self._channel is not None
        result: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._updates[update.version] = result
        self._channel.send(Message("update", {"version": update.version, "path": str(update.path)}))
        await result

    async def close(self) -> None:
        """See `InferenceEngine.close`."""
        self._is_closing = True
        if self._receiving is not None:
            self._receiving.cancel()
        await self._kill()
        for future in (*self._generations.values(), *self._updates.values()):
            future.cancel()

    async def _kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        if hasattr(self, "_ended"):
            self._ended.set()

    async def _receive(self) -> None:
        assert self._channel is not None
        try:
            while True:
                message = await self._channel.receive()
                getattr(self, f"_on_{message.kind}")(message.fields)
        except ChannelClosed:
            if not self._is_closing:
                await self._died()

    def _on_generated(self, fields: dict[str, object]) -> None:
        future = self._generations.pop(str(fields["id"]), None)
        if future is not None and not future.done():
            generation = Generation(
                fields["output_ids"],  # type: ignore[arg-type]
                fields["logprobs"],  # type: ignore[arg-type]
                fields["versions"],  # type: ignore[arg-type]
                FinishReason(fields["finish_reason"]),
            )
            future.set_result(generation)

    def _on_refused(self, fields: dict[str, object]) -> None:
        future = self._generations.pop(str(fields["id"]), None)
        if future is not None and not future.done():
            future.set_exception(ValueError(fields["error"]))

    def _on_updated(self, fields: dict[str, object]) -> None:
        future = self._updates.pop(int(str(fields["version"])))
        if "error" in fields:
            future.set_exception(RunError(f"weights of version {fields['version']} are refused: {fields['error']}"))
        else:
            future.set_result(None)

    async def _died(self) -> None:
        assert self._process is not None
        await self._process.wait()
        self._dead = RunError(f"the embedded engine has died; {self._last_words()}", hints=[f"see {self._log}"])
        for future in (*self._generations.values(), *self._updates.values()):
            if not future.done():
                future.set_exception(self._dead)

    def _last_words(self) -> str:
        code = self._process.returncode if self._process is not None else None
        how = exit_description(code) if code is not None else "no answer in time"
        return f"{how}; the end of its log:\n{last_lines(self._log)}"
