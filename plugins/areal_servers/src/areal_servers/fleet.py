"""A fleet of inference servers as one inference engine.

`roster` knows which servers there are and where each is in its life, `routing` gives requests to servers, `updating`
changes weights, and `tending` does for each server what it needs. When a server is stopped, lost or taken out, its
requests go on elsewhere with the tokens that they had.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.messages.servers import ServerJoins, ServerLeaves, ServerStanding
from areal_servers.answer import Conversations
from areal_servers.roster import Roster, State
from areal_servers.routing import Router
from areal_servers.tending import Tending
from areal_servers.updating import BroadcastGroups, Updater

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.data import Generation
    from areal_core.interfaces import GenerationRequest, ModelReference
    from areal_core.launchers.member import Member
    from areal_servers.interface import ServerAdapter
    from areal_servers.settings import FleetSettings

_UNLIMITED = 1 << 31


class ServerFleet:
    """An `InferenceEngine` whose requests are answered by HTTP servers.

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
        settings: FleetSettings,
        adapter: ServerAdapter,
        log_dir: Path,
        member: Member | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        self.capabilities = replace(adapter.capabilities(), tells_places=True)
        self.adapter = adapter
        self.settings = settings
        self._log_dir = Path(log_dir)
        self._member, self._gpus = member, gpus
        self.roster = Roster(self._log_dir / "servers.jsonl")
        self._router = Router(self.roster, settings.max_concurrent_requests, Conversations(settings.update_mode))
        note = self._log_dir / "broadcast_group"
        groups = BroadcastGroups(adapter, self.roster, settings.group_timeout_s, note)
        self._updater = Updater(self.roster, groups, settings.update_timeout_s, member)
        self._tending: Tending | None = None
        self._vocabulary = _UNLIMITED
        # What one part does alone is its own; see `InferenceEngine`, `BroadcastReceiver` and `MemorySharer`.
        self.describe = self.roster.describe
        self.generate_everywhere = self._router.answer_everywhere
        self.update_weights = self._updater.update_weights
        self.form_group = self._updater.form_group
        self.needs_folder = self._updater.needs_folder
        self.offer_folder = self._updater.offer_folder
        self.release_memory = self._updater.release_memory

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`: returns when `servers.minimum` are ready."""
        if self.settings.servers and self._member is None:
            raise RunError(
                "servers are started by a run, and this is none",
                hints=["start one with `areal serve`, then set servers=0 and name it in addresses"],
            )
        folder = Path(model.path)
        try:
            description: dict[str, Any] = json.loads((folder / "config.json").read_text())
            # Where a config does not say, the class of the model does, which is not known here.
            self._updater.begin(folder, is_tied=description.get("tie_word_embeddings") is not False)
        except (OSError, ValueError) as error:
            raise RunError(
                f"servers need the model as a local folder, and {folder} is none: {error}",
                hints=["download it first and set model.path to the folder"],
            ) from None
        # A model that sees has the vocabulary of its language model.
        self._vocabulary = int((description | (description.get("text_config") or {})).get("vocab_size", _UNLIMITED))
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._tending = Tending(self.settings, self.roster, self._updater, model, self.adapter, self._member)
        await self._tending.start(self._gpus)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        used = [member for member in self.roster.members.values() if member.state not in (State.REFUSED, State.GONE)]
        context = min((member.identity.context for member in used if member.identity), default=_UNLIMITED)
        request.check(self._vocabulary, context, "the servers take")
        if asked := request.sampling.unsupported(self.capabilities.sampling):
            raise ValueError(f"the servers do not support the sampling settings {', '.join(asked)}")
        request.sampling.check()
        return await self._router.answer(request)

    async def answer(self, message: object) -> ServerStanding:
        """See `Questioned.answer`: servers that others have started join and leave."""
        if self._tending is None or not isinstance(message, ServerJoins | ServerLeaves):
            raise RunError(f"servers cannot answer a {type(message).__name__} now")
        act = self._tending.join if isinstance(message, ServerJoins) else self._tending.leave
        act(message.name, message.address)
        member = self.roster.members.get(message.name)
        return ServerStanding(str(member.state) if member else "", self.roster.reasons.get(message.name, ""))

    def take_metrics(self) -> dict[str, float]:
        """See `InferenceEngine.take_metrics`."""
        versions = [member.version for member in self.roster.ready]
        metrics = {**self._router.counts, **self._updater.timings, "servers/ready": float(len(versions))}
        metrics["servers/version_skew"] = float(max(versions) - min(versions)) if versions else 0.0
        self._router.counts.clear()
        self._updater.timings.clear()
        return metrics

    async def close(self) -> None:
        """See `InferenceEngine.close`: servers go on; those of the run end with it."""
        self.roster.fail(RunError("the servers were closed"))
        if self._tending is not None:
            await self._tending.close()
