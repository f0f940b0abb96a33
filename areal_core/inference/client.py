"""The client of servers: generates in each rollout worker, and in the controller for the log-probability check."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING

from areal_core.inference.answer import Answer, Conversations, PartialTokens, is_resumable
from areal_core.inference.errors import RequestRefusedError, known_form
from areal_core.interfaces.inference import ServerLostError, SlotRequest
from areal_core.interfaces.slots import SlotLease

if TYPE_CHECKING:
    from areal_core.data import Generation
    from areal_core.inference.adapter import Connection, ServerAdapter
    from areal_core.interfaces.inference import GenerationRequest, Grant, Slots

MOST_LOSSES = 4
"""Number of servers lost in a row under one request after which it is refused: it may be what kills them."""
MOST_EMPTY_PARTIALS = 20
"""Number of partial generations in a row without a token after which their server counts as lost."""


class ServersClient:
    """An `InferenceClient` for servers.

    Args:
        adapter: speaks to the servers.
        slots: leases their slots.
    """

    def __init__(self, adapter: ServerAdapter, slots: Slots) -> None:
        self.capabilities = adapter.capabilities()
        self._adapter = adapter
        self._slots = slots
        self._conversations = Conversations(adapter.settings.update_mode)
        self._connections: dict[str, Connection] = {}
        self._client_id = secrets.token_hex(4)  # a server has requests of several workers, and of their predecessors

    async def generate(self, request: GenerationRequest, avoided: tuple[str, ...] = ()) -> Generation:
        """See `InferenceClient.generate`. If a server is lost or paused, the request continues on another one.

        Args:
            request: the request.
            avoided: servers that are asked only if no other is ready. Such a request goes to the front of the queue.

        Raises:
            ValueError: a server refuses the request, or too many servers were lost under it.
            RunError: no server will ever be ready again.
        """
        if unsupported := request.sampling.unsupported(self.capabilities.sampling):
            raise ValueError(f"the servers do not support the sampling settings {', '.join(unsupported)}")
        request.sampling.check()
        answer = Answer(request, self._conversations, self._client_id)
        prefixes = []
        if request.conversation:
            prefixes.append(f"of {self._client_id}{request.conversation}")
        if request.affinity:
            prefixes.append(f"group {request.affinity}")
        lost_servers: list[str] = []
        empty_partials = 0
        while answer.finish is None:
            tokens_before = len(answer.sampled)
            server = ""
            slot_request = SlotRequest(
                tuple(prefixes),
                (*avoided, *lost_servers),
                is_continued=bool(answer.partials or avoided),
                is_resumable=is_resumable(request.sampling),
            )
            try:
                async with SlotLease(self._slots, slot_request, request.on_slot_change) as grant:
                    request.check(grant.vocabulary, grant.context, "the servers take")
                    server = grant.server
                    await self._generate_partial(grant, answer)
                    empty_partials = empty_partials + 1 if len(answer.sampled) == tokens_before else 0
                    if empty_partials > MOST_EMPTY_PARTIALS:
                        raise ServerLostError("repeatedly ends a request without a token")
                    lost_servers.clear()
            except ServerLostError as error:
                if len(answer.sampled) > tokens_before:
                    lost_servers.clear()
                if server:
                    lost_servers.append(server)
                if len(lost_servers) == MOST_LOSSES:
                    message = f"{MOST_LOSSES} servers failed under this request; the last one: {error}"
                    raise ValueError(message) from None
            except RequestRefusedError as error:
                raise ValueError(f"{server} {error}") from None
        return answer.generation()

    async def close(self) -> None:
        """See `InferenceClient.close`."""
        for connection in self._connections.values():
            connection.close()

    async def _generate_partial(self, grant: Grant, answer: Answer) -> None:
        """Ask a server for the rest of an answer, and keep the tokens with their versions. The rest may be incomplete.

        Raises:
            ServerLostError: the server failed. The tokens whose version is certain are kept.
            RequestRefusedError: the server refuses the request.
        """
        partial = answer.next_partial(grant)
        tokens = PartialTokens(grant, partial.sampling, len(partial.input_ids))
        try:
            with known_form():
                chunks = self._adapter.generate(self._connect(grant.address), partial)
                async with aclosing(chunks):  # type: ignore[type-var]
                    async for chunk in chunks:
                        tokens.add(chunk)
                        answer.show(tokens)
            if fault := tokens.fault():
                raise ServerLostError(f"sent {fault}")
            versions = tokens.versions()
        except (ServerLostError, asyncio.CancelledError):
            if not tokens.fault():
                answer.keep_labeled(tokens)
            raise
        answer.keep(tokens, versions)

    def _connect(self, address: str) -> Connection:
        if address not in self._connections:
            self._connections[address] = self._adapter.connect(address)
        return self._connections[address]
