"""Which server works on which request."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_servers.answer import Answer, Conversations
from areal_servers.errors import RequestRefusedError, ServerLostError
from areal_servers.roster import State

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    from areal_core.data import Generation
    from areal_core.interfaces.inference import GenerationRequest
    from areal_servers.roster import Member, Roster

MOST_LOSSES = 4
"""A request that so many servers in a row were lost under is not given to another one: it may be what kills them."""
MOST_EMPTY_PIECES = 20
REMEMBERED = 1 << 16
"""Prefixes whose server is remembered."""


class Router:
    """Gives each request a place on a server: where its prefix lies, else where least is to do; in order of arrival.

    Args:
        roster: the servers.
        limit: requests that one server is given at once; None for what it says itself.
        conversations: know the cache keys.

    Attributes:
        counts: pieces, those that continued a request, and those that failed, since somebody cleared it.
    """

    def __init__(self, roster: Roster, limit: int | None, conversations: Conversations) -> None:
        self._roster = roster
        self._limit = limit
        self._conversations = conversations
        self._places: OrderedDict[str, Member] = OrderedDict()
        self._waiting: deque[tuple[asyncio.Future[Member], Sequence[str], Collection[Member]]] = deque()
        self.counts: Counter[str] = Counter()
        roster.on_change = self.wake

    async def answer(self, request: GenerationRequest) -> Generation:
        """Have a request worked on until it is answered in full, by one server after another where need be.

        Raises:
            ValueError: a server refuses it, or too many were lost under it.
            RunError: no server is left.
        """
        answer = Answer(request, self._conversations)
        common = {"conversation": request.conversation, "affinity": request.affinity}
        prefixes = [f"{kind} {name}" for kind, name in common.items() if name]
        losses: list[Member] = []
        empty = 0
        while answer.finish is None:
            if answer.pieces:
                request.on_place(False)
            member = await self.take(prefixes, losses, is_continued=answer.pieces > 0)
            request.on_place(True)
            before = len(answer.output_ids)
            try:
                await member.work(answer)
                member.failures = 0
                losses.clear()
                empty = empty + 1 if len(answer.output_ids) == before else 0
                if empty > MOST_EMPTY_PIECES:
                    raise ServerLostError("ends a request again and again without a token")
            except ServerLostError as error:
                losses.append(member)
                self.counts["servers/failed"] += 1
                self._roster.doubt(member, str(error))
                if len(losses) == MOST_LOSSES:
                    raise ValueError(
                        f"{MOST_LOSSES} servers failed under this request; the last one: {error}"
                    ) from None
            except RequestRefusedError as error:
                raise ValueError(f"{member.name} {error}") from None
            finally:
                self.release(member)
            self.counts["servers/pieces"] += 1
        self.counts["servers/continued"] += answer.pieces - 1
        return answer.generation()

    async def answer_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """The same request, answered by each server that is ready; those that fail are left out.

        Where none is ready, or all of them fail, it is waited for one that is.

        Raises:
            RunError: no server will be ready again.
        """
        while True:
            if not self._roster.ready:
                self.release(await self.take())
            found = [answer.generation() for answer in await self._answers(request) if answer.finish is not None]
            if found:
                return found

    async def _answers(self, request: GenerationRequest) -> list[Answer]:
        answers = [
            (member, Answer(replace(request, request_id=f"{request.request_id}-{member.name}"), self._conversations))
            for member in self._roster.ready
        ]
        for member, answer in answers:
            member.requests += 1
            known = -1
            try:
                while answer.finish is None and len(answer.output_ids) > known:  # it may end in the middle and go on
                    known = len(answer.output_ids)
                    await member.work(answer)
            except (ServerLostError, RequestRefusedError) as error:  # a gateway refuses what its server would not
                self._roster.doubt(member, str(error))
            finally:
                self.release(member)
        return [answer for _, answer in answers]

    async def take(
        self, prefixes: Sequence[str] = (), avoided: Collection[Member] = (), *, is_continued: bool = False
    ) -> Member:
        """A place on a server; `release` gives it back.

        Args:
            prefixes: names of what may lie on a server already, the longest first; it goes there where that is no
                detour.
            avoided: servers that are given this request only where no other is ready.
            is_continued: the request had a place before, and so came before all who wait.

        Raises:
            RunError: no server will be ready again.
        """
        while True:
            place: asyncio.Future[Member] = asyncio.get_running_loop().create_future()
            line_up = self._waiting.appendleft if is_continued else self._waiting.append
            line_up((place, prefixes, avoided))
            self.wake()
            try:
                member = await place
            except asyncio.CancelledError:
                # A place that was given to a request that no longer wants it goes to the next one.
                if place.done() and not place.cancelled() and place.exception() is None:
                    self.release(place.result())
                raise
            if member.state is State.READY:
                return member
            self.release(member)  # it was stopped or lost before the request came to know of its place
            is_continued = True

    def release(self, member: Member) -> None:
        """A request has left a server."""
        member.requests -= 1
        self.wake()

    def wake(self) -> None:
        """Give the free places to those who wait, in the order in which they came."""
        failure = self._roster.failure
        passed = []  # they wait on for a server that they do not avoid
        while self._waiting and (failure is not None or self._free(self._roster.ready)):
            place, prefixes, avoided = self._waiting.popleft()
            if place.done():
                continue
            if failure is not None:
                place.set_exception(failure)
            elif (member := self._choose(prefixes, avoided)) is None:
                passed.append((place, prefixes, avoided))
            else:
                member.requests += 1
                place.set_result(member)
        self._waiting.extendleft(reversed(passed))

    def _slots(self, member: Member) -> int:
        """Requests that a server is given at once."""
        own = member.identity.slots if member.identity else 1
        return min(own, self._limit) if self._limit else own

    def _free(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if member.requests < self._slots(member)]

    def _choose(self, prefixes: Sequence[str], avoided: Collection[Member]) -> Member | None:
        ready = self._roster.ready
        free = self._free([member for member in ready if member not in avoided] or ready)
        if not free:
            return None
        least = min(free, key=lambda member: member.requests / self._slots(member))
        chosen = next((self._places[prefix] for prefix in prefixes if prefix in self._places), None)
        # A prefix is worth a detour, but not a queue: its server may have a quarter more to do than the idlest one.
        if chosen is None or chosen not in free or chosen.requests > least.requests + 1 + self._slots(chosen) // 4:
            chosen = least
        for prefix in prefixes:
            self._places[prefix] = chosen
            self._places.move_to_end(prefix)
        while len(self._places) > REMEMBERED:
            self._places.popitem(last=False)
        return chosen
