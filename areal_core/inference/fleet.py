"""A fleet of inference servers as one inference engine.

`pool` holds the servers, `routing` leases their slots, and `lifecycle` moves each server through its states and gives
it weights. Tokens do not pass through here: rollout workers ask the servers themselves (`client`). When a server is
paused, lost or taken out, its requests continue elsewhere with the tokens that they have.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.inference.broadcast import BroadcastGroups
from areal_core.inference.client import ServersClient
from areal_core.inference.lifecycle import Lifecycle
from areal_core.inference.local import LocalServers
from areal_core.inference.pool import ServerPool
from areal_core.inference.reading import Reading
from areal_core.inference.routing import Router
from areal_core.inference.server import State
from areal_core.interfaces.inference import InferenceEngine
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Generation
    from areal_core.inference.adapter import ServerAdapter
    from areal_core.inference.lifecycle import DriverConnection
    from areal_core.interfaces.inference import (
        BroadcastGroup,
        GenerationRequest,
        LeaseHolder,
        SharedTensor,
        SlotRequest,
        Slots,
        WeightUpdate,
    )
    from areal_core.interfaces.model import ModelReference


class ServerFleet(InferenceEngine):
    """An inference engine whose requests are answered by servers.

    A run constructs it with the adapter that the config names. In other programs it starts the servers itself, on this
    machine, and ends them when it is closed.

    Args:
        adapter: speaks to servers of one kind. Its settings are the fleet's.
        log_dir: folder for the log of transitions, `servers.jsonl`, and for the logs of servers that the fleet starts.
        driver: the run's driver (`areal_core.processes.Member`), which starts the servers; None in other programs.
        gpus: the GPUs of these servers, as in `placement`; None if it names none.
    """

    def __init__(
        self,
        adapter: ServerAdapter,
        log_dir: Path,
        driver: DriverConnection | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        settings = adapter.settings
        self.capabilities = adapter.capabilities()
        self.adapter = adapter
        self._log_dir = Path(log_dir)
        self._gpus = gpus
        self._local: LocalServers | None = None
        if driver is None:
            driver = self._local = LocalServers(adapter, self._log_dir, gpus)
        self.pool = ServerPool(self._log_dir / "servers.jsonl")
        self.pool.log = driver.log
        self._router = Router(self.pool, settings.max_concurrent_requests)
        note = self._log_dir / "broadcast_group"
        groups = BroadcastGroups(adapter, self.pool, settings.group_timeout_s, note)
        self.lifecycle = Lifecycle(adapter, self.pool, groups, driver)
        self._reading = Reading(adapter, self.pool, self.lifecycle)
        self._client: ServersClient | None = None

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`: returns when `servers.minimum` are ready."""
        self._client = self.client(self, model)
        if self._local is not None:
            self._local.model = model
        try:
            description = json.loads((Path(model.path) / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"servers need the model as a local folder, and {model.path} is none: {error}") from None
        # If a config does not say, the class of the model decides, which is not known here.
        is_tied = description.get("tie_word_embeddings") is not False
        # A VLM has the vocabulary of its language model.
        text_description = description | (description.get("text_config") or {})
        self.pool.vocabulary = text_description.get("vocab_size", self.pool.vocabulary)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        await self.lifecycle.start(model, self._gpus, is_tied=is_tied)

    def client(self, slots: Slots, model: ModelReference) -> ServersClient:
        """See `InferenceEngine.client`."""
        self.adapter.serve(model)
        return ServersClient(self.adapter, slots)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        assert self._client is not None
        return await self._client.generate(request)

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """See `InferenceEngine.generate_everywhere`. Servers that are lost meanwhile are left out."""
        assert self._client is not None
        names = [server.name for server in self.pool.ready] or [""]
        requests = (
            self._client.generate(
                replace(request, request_id=f"{request.request_id}-{name}"),
                avoided=tuple(other for other in self.pool.servers if other != name) if name else (),
            )
            for name in names
        )
        results = await asyncio.gather(*requests, return_exceptions=True)
        ready = [server.name for server in self.pool.ready]
        for name, result in zip(names, results, strict=True):
            if isinstance(result, BaseException) and name in ready:
                raise result
        answers = [result for result in results if not isinstance(result, BaseException)]
        return answers or [await self._client.generate(request)]

    async def answer(self, message: object) -> ServerStanding:
        """See `InferenceEngine.answer`. Servers of `areal serve` join and leave."""
        if not self.lifecycle.is_started or not isinstance(message, ServerJoins | ServerLeaves):
            raise RunError(f"servers cannot answer a {type(message).__name__} now")
        act = self.lifecycle.join if isinstance(message, ServerJoins) else self.lifecycle.leave
        act(message.name, message.address)
        server = self.pool.servers.get(message.name)
        return ServerStanding(str(server.state) if server else "", self.pool.reasons.get(message.name, ""))

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`."""
        self._router.acquire(request, holder)

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        self._router.release(holder, has_failed=has_failed)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`."""
        await self._reading.end(update)
        await self.lifecycle.update_weights(update)

    async def read_tensors(self, version: int, tensors: Sequence[SharedTensor]) -> list[int]:
        """See `InferenceEngine.read_tensors`."""
        return await self._reading.read(version, tensors)

    def leave_out(self, names: Sequence[str]) -> None:
        """See `InferenceEngine.leave_out`."""
        self.lifecycle.leave_out(names)

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `InferenceEngine.form_group`."""
        return await self.lifecycle.form_group(address, port, backend, current_group)

    def needs_folder(self) -> bool:
        """See `InferenceEngine.needs_folder`."""
        return self.lifecycle.needs_folder()

    def offer_folder(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.offer_folder`."""
        self.lifecycle.offer_folder(update)

    async def sleep(self) -> None:
        """See `InferenceEngine.sleep`."""
        await self.lifecycle.sleep()

    def describe(self) -> str:
        """See `InferenceEngine.describe`."""
        return self.pool.describe()

    def pop_metrics(self) -> dict[str, float]:
        """See `InferenceEngine.pop_metrics`."""
        versions = [server.version for server in self.pool.in_state(State.READY, State.UPDATING)]
        metrics = {**self._router.counts, **self.lifecycle.timings, "servers/ready": float(len(versions))}
        metrics["servers/version_skew"] = float(max(versions) - min(versions)) if versions else 0.0
        self._router.counts.clear()
        self.lifecycle.timings.clear()
        return metrics

    async def close(self) -> None:
        """See `InferenceEngine.close`. Servers that the fleet did not start keep running."""
        self.pool.fail(RunError("the servers were closed"))
        for server in self.pool.servers.values():
            self.pool.on_lost(server)
        await self.lifecycle.close()
        if self._client is not None:
            await self._client.close()
        if self._local is not None:
            await self._local.close()
