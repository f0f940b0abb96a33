"""A fleet of inference servers as one inference engine.

`pool` knows which servers there are and where each is in its life, `routing` gives out their slots, `updating`
changes weights, and `tending` does for each server what it needs. Tokens do not pass through here: rollout workers ask
servers themselves (`client`). When a server is stopped, lost or taken out, its requests go on elsewhere with the tokens
that they had.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.errors import RunError
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding
from areal_core.servers.client import ServersClient
from areal_core.servers.pool import ServerPool, State
from areal_core.servers.routing import Router
from areal_core.servers.tending import Tending
from areal_core.servers.updating import BroadcastGroups, Updater

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Generation
    from areal_core.interfaces import (
        BroadcastGroup,
        GenerationRequest,
        ModelReference,
        SlotHolder,
        Slots,
        Want,
        WeightUpdate,
    )
    from areal_core.launchers.member import Member
    from areal_core.servers.interface import ServerAdapter
    from areal_core.servers.settings import ServerSettings


class ServerFleet:
    """An `InferenceEngine` whose requests are answered by servers.

    Also a `BroadcastReceiver`, a `MemorySharer`, and `Questioned`.

    Args:
        settings: of the fleet.
        adapter: speaks to servers of one kind.
        log_dir: for the list of transitions, `servers.jsonl`.
        member: this process in the run that starts servers; without it those of `settings.addresses` alone are used.
        gpus: of the run's own servers, by their numbers in `placement`; None where it names none.
    """

    def __init__(
        self,
        settings: ServerSettings,
        adapter: ServerAdapter,
        log_dir: Path,
        member: Member | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        self.capabilities = adapter.capabilities()
        self.adapter = adapter
        self.settings = settings
        self._log_dir = Path(log_dir)
        self._member, self._gpus = member, gpus
        self.pool = ServerPool(self._log_dir / "servers.jsonl")
        if member is not None:
            self.pool.log = member.log
        self._router = Router(self.pool, settings.max_concurrent_requests)
        note = self._log_dir / "broadcast_group"
        groups = BroadcastGroups(adapter, self.pool, settings.group_timeout_s, note)
        self._updater = Updater(self.pool, groups, settings.update_timeout_s, member)
        self._tending: Tending | None = None
        self._client: ServersClient | None = None

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`: returns when `servers.minimum` are ready."""
        self._client = self.client(self, model)
        if self.settings.servers and self._member is None:
            raise RunError(
                "servers are started by a run, and this is none",
                hints=["start one with `areal serve`, then set servers=0 and name it in addresses"],
            )
        try:
            description = json.loads((Path(model.path) / "config.json").read_text())
        except (OSError, ValueError) as error:
            raise RunError(f"servers need the model as a local folder, and {model.path} is none: {error}") from None
        # Where a config does not say, the class of the model does, which is not known here.
        self._updater.begin(Path(model.path), is_tied=description.get("tie_word_embeddings") is not False)
        # A model that sees has the vocabulary of its language model.
        described = description | (description.get("text_config") or {})
        self.pool.vocabulary = described.get("vocab_size", self.pool.vocabulary)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._tending = Tending(self.settings, self.pool, self._updater, model, self.adapter, self._member)
        await self._tending.start(self._gpus)

    def client(self, slots: Slots, model: ModelReference) -> ServersClient:
        """See `InferenceEngine.client`."""
        self.adapter.serve(model)
        return ServersClient(self.settings, self.adapter, slots)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        assert self._client is not None
        return await self._client.generate(request)

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """See `InferenceEngine.generate_everywhere`: of servers that are ready, and stay so."""
        assert self._client is not None
        names = [member.name for member in self.pool.ready] or [""]
        asked = (
            self._client.generate(
                replace(request, request_id=f"{request.request_id}-{name}"),
                avoided=tuple(other for other in self.pool.members if other != name) if name else (),
            )
            for name in names
        )
        found = await asyncio.gather(*asked, return_exceptions=True)
        ready = [member.name for member in self.pool.ready]
        for name, each in zip(names, found, strict=True):
            if isinstance(each, BaseException) and name in ready:
                raise each
        answers = [each for each in found if not isinstance(each, BaseException)]
        return answers or [await self._client.generate(request)]

    async def answer(self, message: object) -> ServerStanding:
        """See `Questioned.answer`: servers that others have started join and leave."""
        if self._tending is None or not isinstance(message, ServerJoins | ServerLeaves):
            raise RunError(f"servers cannot answer a {type(message).__name__} now")
        act = self._tending.join if isinstance(message, ServerJoins) else self._tending.leave
        act(message.name, message.address)
        member = self.pool.members.get(message.name)
        return ServerStanding(str(member.state) if member else "", self.pool.reasons.get(message.name, ""))

    def acquire(self, want: Want, holder: SlotHolder) -> None:
        """See `Slots.acquire`."""
        self._router.acquire(want, holder)

    def release(self, holder: SlotHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        self._router.release(holder, has_failed=has_failed)

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`."""
        await self._updater.update_weights(update)

    async def form_group(self, address: str, port: int, backend: str, current_group: str) -> BroadcastGroup | None:
        """See `BroadcastReceiver.form_group`."""
        return await self._updater.form_group(address, port, backend, current_group)

    def needs_folder(self) -> bool:
        """See `BroadcastReceiver.needs_folder`."""
        return self._updater.needs_folder()

    def offer_folder(self, update: WeightUpdate) -> None:
        """See `BroadcastReceiver.offer_folder`."""
        self._updater.offer_folder(update)

    async def sleep(self) -> None:
        """See `MemorySharer.sleep`."""
        await self._updater.sleep()

    def describe(self) -> str:
        """See `InferenceEngine.describe`."""
        return self.pool.describe()

    def take_metrics(self) -> dict[str, float]:
        """See `InferenceEngine.take_metrics`."""
        versions = [member.version for member in self.pool.those(State.READY, State.UPDATING)]
        metrics = {**self._router.counts, **self._updater.timings, "servers/ready": float(len(versions))}
        metrics["servers/version_skew"] = float(max(versions) - min(versions)) if versions else 0.0
        self._router.counts.clear()
        self._updater.timings.clear()
        return metrics

    async def close(self) -> None:
        """See `InferenceEngine.close`: servers go on; those of the run end with it."""
        self.pool.fail(RunError("the servers were closed"))
        for member in self.pool.members.values():
            self.pool.on_lost(member)
        if self._tending is not None:
            await self._tending.close()
        if self._client is not None:
            await self._client.close()
