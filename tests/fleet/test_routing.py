"""Which server works on which request, and in which order requests come to their places."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from areal_core.errors import RunError
from areal_core.inference.adapter import ServerIdentity
from areal_core.inference.pool import ServerPool
from areal_core.inference.routing import Router
from areal_core.inference.server import InferenceServer, State
from areal_core.servers import ServerLostError, SlotLease, SlotRequest
from areal_testing.virtual_time import run_virtually


class Adapter:
    def name_of(self, connection):
        return ""


class Connection:
    address = "http://there"

    async def close(self):
        pass


def member(name, slots=4, state=State.READY):
    found = InferenceServer(name, Adapter(), Connection(), "recompute")
    found.identity = ServerIdentity("1", "", 1024, slots)
    found.state = state
    return found


class Line:
    """Routers, and who lines up for their slots."""

    def __init__(self, *members, limit=None):
        self.pool = ServerPool(Path("/dev/null"))
        self.pool.servers = {one.name: one for one in members}
        self.router = Router(self.pool, limit)
        self.wake = self.router.wake
        self.held = []

    async def take(self, prefixes=(), avoided=(), *, is_continued=False):
        """The server of a slot, which is held until `release`."""
        names = tuple(one.name for one in avoided)
        slot = SlotLease(self.router, SlotRequest(tuple(prefixes), names, is_continued))
        found = self.pool.servers[(await slot.__aenter__()).server]
        self.held.append((found, slot))
        return found

    def release(self, member):
        found = next(one for one in self.held if one[0] is member)
        self.held.remove(found)
        self.router.release(found[1])


def router(*members, limit=None):
    return Line(*members, limit=limit)


async def turns(count=5):
    for _ in range(count):
        await asyncio.sleep(0)


def asked(of, count=1, **settings):
    return [asyncio.create_task(of.take(**settings)) for _ in range(count)]


def test_a_request_goes_where_least_is_to_do():
    async def check():
        small, large = member("small", slots=2), member("large", slots=8)
        of = router(small, large)
        found = [(await of.take()).name for _ in range(10)]
        assert found.count("small") == 2
        assert found.count("large") == 8
        assert found[:3].count("large") >= 1

    run_virtually(check())


def test_requests_of_one_prefix_stay_together_until_that_is_a_queue():
    async def check():
        a, b = member("a", slots=8), member("b", slots=8)
        of = router(a, b)
        first = await of.take(["prefix"])
        other = b if first is a else a
        assert [(await of.take(["prefix"])) for _ in range(2)] == [first, first], (
            "two more are a detour that is worth it"
        )
        for _ in range(4):
            await of.take(["prefix"])
        assert other.requests >= 1, "its server may have a quarter more to do than the idlest one, and no more"
        for taken in (a, b):
            while taken.requests:
                of.release(taken)
        last = of.router._server_of_prefix["prefix"]
        assert await of.take(["prefix"]) is last, "it is remembered where the prefix lies now"

    run_virtually(check())


def test_a_conversation_goes_where_it_was_although_its_siblings_went_elsewhere():
    async def check():
        a, b = member("a", slots=8), member("b", slots=8)
        of = router(a, b)
        first = await of.take(["conversation 1", "affinity g"])
        other = b if first is a else a
        first.state = State.UPDATING
        assert await of.take(["conversation 2", "affinity g"]) is other
        first.state = State.READY
        assert await of.take(["conversation 1", "affinity g"]) is first
        assert await of.take(["conversation 3", "affinity g"]) is first, "a new one follows the last of its siblings"

    run_virtually(check())


def test_a_prefix_whose_server_is_gone_moves_and_stays_where_it_moved():
    async def check():
        a, b = member("a"), member("b")
        of = router(a, b)
        first = await of.take(["prefix"])
        of.release(first)
        first.state = State.LOST
        second = await of.take(["prefix"])
        assert second is not first
        of.release(second)
        first.state = State.READY
        assert await of.take(["prefix"]) is second

    run_virtually(check())


@pytest.mark.parametrize("state", [state for state in State if state is not State.READY])
def test_only_ready_servers_are_given_requests(state):
    async def check():
        a = member("a", state=state)
        of = router(a)
        (waiting,) = asked(of)
        await turns()
        assert not waiting.done()
        a.state = State.READY
        of.wake()
        assert await waiting is a

    run_virtually(check())


def test_a_server_is_given_no_more_than_its_slots_and_the_limit():
    async def check():
        for limit, wanted in ((None, 4), (3, 3), (9, 4)):
            a = member("a", slots=4)
            of = router(a, limit=limit)
            waiting = asked(of, 10)
            await turns()
            assert sum(task.done() for task in waiting) == a.requests == wanted
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    run_virtually(check())


def test_places_are_given_in_the_order_of_arrival():
    """Whoever comes while others wait comes behind them, even in the moment in which a place becomes free."""

    async def check():
        a = member("a", slots=1)
        of = router(a)
        await of.take()
        order = []

        async def one(number):
            await of.take()
            order.append(number)
            await asyncio.sleep(0)
            of.release(a)

        tasks = [asyncio.create_task(one(number)) for number in range(8)]
        await turns()
        of.release(a)
        late = asyncio.create_task(one(8))  # here the place is free, and seven wait for it
        await asyncio.gather(*tasks, late)
        assert order == list(range(9))

    run_virtually(check())


def test_continued_requests_come_first_and_in_order_of_arrival():
    async def check():
        a = member("a", slots=1)
        of = router(a)
        await of.take()
        (new,) = asked(of)
        await turns()
        first, second = asked(of, 2, is_continued=True)
        await turns()
        of.release(a)
        assert await asyncio.wait_for(first, 5) is a
        assert not second.done()
        assert not new.done()
        of.release(a)
        assert await second is a
        assert not new.done()
        of.release(a)
        assert await new is a

    run_virtually(check())


def test_a_cancelled_request_hands_its_place_on():
    async def check():
        a = member("a", slots=1)
        of = router(a)
        await of.take()
        first, second, third = asked(of, 3)
        await turns()
        first.cancel()  # while it waits
        await turns()
        of.release(a)  # the place is the second one's now, who does not know of it yet
        second.cancel()
        assert await asyncio.wait_for(third, 5) is a
        assert a.requests == 1
        assert first.cancelled()
        assert second.cancelled()
        of.release(a)
        assert a.requests == 0

    run_virtually(check())


def test_a_request_avoids_servers_that_failed_under_it_while_there_are_others():
    async def check():
        a, b = member("a", slots=1), member("b", slots=1)
        of = router(a, b)
        assert await of.take(avoided=[a]) is b
        (waiting,) = asked(of, avoided=[a])
        await turns()
        assert not waiting.done(), "it waits for b"
        (other,) = asked(of)
        assert await other is a, "those who avoid nothing do not wait with it"
        of.release(b)
        assert await waiting is b
        b.state = State.LOST
        of.release(a)
        assert await of.take(avoided=[a]) is a, "with nobody else left"

    run_virtually(check())


def test_what_was_asked_of_a_lost_server_is_broken_off_and_asked_of_another():
    async def check():
        a, b = member("a"), member("b", state=State.LOST)
        of = router(a, b)

        async def ask(avoided=()):
            async with SlotLease(of.router, SlotRequest((), avoided)) as grant:
                await asyncio.sleep(60 if grant.server == "a" else 0)
            return grant.server

        asking = [asyncio.create_task(ask()) for _ in range(2)]
        await turns()
        a.state = State.LOST
        of.pool.on_lost(a)
        for task in asking:
            with pytest.raises(ServerLostError, match="a was lost"):
                await task
        assert a.requests == 0
        b.state = State.READY
        assert await ask(("a",)) == "b"

    run_virtually(check())


def test_a_failure_is_a_hint_to_look_at_the_server_and_counted():
    async def check():
        a = member("a")
        of = router(a)
        with pytest.raises(ServerLostError):
            async with SlotLease(of.router, SlotRequest()):
                raise ServerLostError("500")
        assert a.doubted.is_set()
        assert a.state is State.READY, "the worker may be what fails"
        assert of.router.counts["servers/failed"] == 1
        waiting = asyncio.ensure_future(of.take())
        await turns()
        assert not waiting.done(), "nobody is sent there before it has been looked at"
        a.doubted.clear()
        of.router.wake()
        await waiting

    run_virtually(check())


def test_a_server_that_is_lost_twice_is_lost_once_for_whoever_holds_its_slot():
    async def check():
        a, task = member("a"), asyncio.current_task()
        of = router(a)
        with pytest.raises(ServerLostError):  # noqa: PT012
            async with SlotLease(of.router, SlotRequest()):
                of.pool.on_lost(a)
                of.pool.on_lost(a)
                await asyncio.Event().wait()
        assert not task.cancelling()

    run_virtually(check())


def test_a_failure_ends_every_wait():
    async def check():
        of = router(member("a", slots=1))
        await of.take()
        waiting = asked(of, 2)
        await turns()
        of.pool.fail(RunError("no server is left"))
        for task in waiting:
            with pytest.raises(RunError, match="no server is left"):
                await task
        with pytest.raises(RunError, match="no server is left"):
            await of.take()

    run_virtually(check())
