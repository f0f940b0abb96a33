"""What asks servers for tokens: in each rollout worker, and in the controller where it tries servers out."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from typing import TYPE_CHECKING

from areal_core.interfaces import ServerLostError, Slot, Want
from areal_core.servers.answer import Answer, Conversations, PartialTokens, is_resumable
from areal_core.servers.errors import RequestRefusedError, known_form

if TYPE_CHECKING:
    from areal_core.data import Generation
    from areal_core.interfaces import GenerationRequest, Grant, Slots
    from areal_core.servers.interface import Connection, GenerationAdapter
    from areal_core.servers.settings import ServerSettings

MOST_LOSSES = 4
"""A request that so many servers in a row were lost under is not given to another one: it may be what kills them."""
MOST_EMPTY_PARTIALS = 20


class ServersClient:
    """An `InferenceClient` for servers.

    Args:
        settings: of the servers.
        adapter: speaks to servers of one kind.
        slots: where slots come from.
    """

    def __init__(self, settings: ServerSettings, adapter: GenerationAdapter, slots: Slots) -> None:
        self.capabilities = adapter.capabilities()
        self._settings = settings
        self._adapter = adapter
        self._slots = slots
        self._conversations = Conversations(settings.update_mode)
        self._connections: dict[str, Connection] = {}
        self._own = secrets.token_hex(4)  # requests of several workers, and of those before them, meet in the servers

    async def generate(self, request: GenerationRequest, avoided: tuple[str, ...] = ()) -> Generation:
        """See `InferenceClient.generate`: by one server after another where need be.

        Args:
            request: what is asked for.
            avoided: servers that are asked only where no other is ready; then it need not wait behind others.

        Raises:
            ValueError: a server refuses it, or too many were lost under it.
            RunError: no server is left.
        """
        if odd := request.sampling.unsupported(self.capabilities.sampling):
            raise ValueError(f"the servers do not support the sampling settings {', '.join(odd)}")
        request.sampling.check()
        answer = Answer(request, self._conversations, self._own)
        own = f"{self._own}{request.conversation}" if request.conversation else ""
        prefixes = tuple(f"{kind} {name}" for kind, name in (("of", own), ("group", request.affinity)) if name)
        losses: list[str] = []
        empty = 0
        while answer.finish is None:
            before, asked = len(answer.sampled), ""
            try:
                is_continued = bool(answer.partials or avoided)
                want = Want(prefixes, (*avoided, *losses), is_continued, is_resumable(request.sampling))
                async with Slot(self._slots, want, request.on_slot) as grant:
                    request.check(grant.vocabulary, grant.context, "the servers take")
                    asked = grant.server
                    await self._work(grant, answer)
                    empty = empty + 1 if len(answer.sampled) == before else 0
                    if empty > MOST_EMPTY_PARTIALS:
                        raise ServerLostError("repeatedly ends a request without a token")
                    losses.clear()
            except ServerLostError as error:
                if len(answer.sampled) > before:
                    losses.clear()
                if asked:
                    losses.append(asked)
                if len(losses) == MOST_LOSSES:
                    message = f"{MOST_LOSSES} servers failed under this request; the last one: {error}"
                    raise ValueError(message) from None
            except RequestRefusedError as error:
                raise ValueError(f"{asked} {error}") from None
        return answer.generation()

    async def _work(self, grant: Grant, answer: Answer) -> None:
        """Ask for the rest of an answer and keep what comes, with labels; it may end before the answer is complete.

        Raises:
            ServerLostError: the server failed; the tokens whose version is certain are kept.
            RequestRefusedError: the server says that the request is wrong.
        """
        partial = answer.next_partial(grant)
        tokens = PartialTokens(grant, partial.sampling.max_new_tokens)
        try:
            with known_form():
                chunks = self._adapter.generate(self._connect(grant.address), partial)
                async with aclosing(chunks):  # type: ignore[type-var]
                    async for chunk in chunks:
                        tokens.add(chunk)
            if fault := tokens.fault():
                raise ServerLostError(f"sent {fault}")
            versions = tokens.versions()
        except (ServerLostError, asyncio.CancelledError):
            if not tokens.fault():
                answer.keep_labeled(tokens)
            raise
        answer.keep(tokens, versions)

    async def close(self) -> None:
        """See `InferenceClient.close`."""
        for connection in self._connections.values():
            connection.close()

    def _connect(self, address: str) -> Connection:
        if address not in self._connections:
            self._connections[address] = self._adapter.connect(address, self._settings)
        return self._connections[address]
