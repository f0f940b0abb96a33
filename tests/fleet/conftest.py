"""Servers that are objects of this process and fail when they are told to."""

from __future__ import annotations

import asyncio
import json
import struct
from concurrent.futures import Future
from contextlib import asynccontextmanager

import pytest

from areal_core.engines import ModelReference, TensorDescription
from areal_core.inference import lifecycle
from areal_core.inference.adapter import Chunk, ServerAdapter, ServerIdentity
from areal_core.inference.errors import UpdateRefusedError
from areal_core.inference.fleet import ServerFleet
from areal_core.inference.settings import FleetSettings
from areal_core.runtime.messages import ColocatedTraining, RestartMember, RoleMembers, ServingMember
from areal_core.servers import (
    GenerationRequest,
    InferenceCapabilities,
    SamplingParameters,
    ServerLostError,
    ServerUnreachableError,
)

TOKENS = 16
TENSORS = (TensorDescription("weight", "float32", (2, 2)),)


class FakeServer:
    """A server that samples its version as token, one token at a time."""

    def __init__(self, context=1024, slots=4):
        self.identity = ServerIdentity("1", "", context, slots)
        self.is_healthy = True
        self.health_fault = None
        self.label = self.version = "0"
        self.fault = None
        self.update_fault = None
        self.loading_s = 0.0
        self.first_fault = None
        self.cannot_join = self.joins_never = self.is_stuck = False
        self.has_memory = True
        self.ends_at_abort = False
        self.token_s = 0.001
        self.under_way = 0
        self.release_fault = None
        self.partials = []
        self.aborts = 0
        self.cache_salts = []
        self.readings = []
        self.reading_faults = {}
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.update_may_go_on = asyncio.Event()
        self.update_may_go_on.set()


class FakeConnection:
    """What the fleet needs of a connection."""

    def __init__(self, address):
        self.address = address

    def close(self):
        pass


class FakeAdapter(ServerAdapter):
    """Speaks to fake servers."""

    name = "Fake"
    group_store_prefixes = {"gloo": ("{group}",)}  # noqa: RUF012

    def __init__(self, settings, servers):
        super().__init__(settings)
        self.servers = servers
        self.left = []

    def connect(self, address):
        return FakeConnection(address)

    async def check_health(self, connection, timeout_s):
        server = self.servers.get(connection.address)
        if server is None or not server.is_healthy:
            raise ServerUnreachableError("/health: ClientConnectorError")
        if server.health_fault is not None:
            raise server.health_fault

    def capabilities(self):
        return InferenceCapabilities(frozenset({"keep_cache", "recompute"}), transports=frozenset({"core/broadcast"}))

    def of(self, connection):
        return self.servers[connection.address]

    async def set_label(self, connection, label):
        self._label(self.of(connection), label)

    @staticmethod
    def _label(server, label):
        server.label, server.version = label, label.rpartition("-")[2]

    async def identify(self, connection):
        return self.of(connection).identity

    async def generate(self, connection, partial):
        server = self.of(connection)
        if server.is_stuck:
            await asyncio.Event().wait()
        is_first = partial.name.startswith("first-")
        server.partials.append(partial.name)
        server.cache_salts.append(partial.cache_salt)
        fault = server.first_fault if is_first else server.fault
        if fault is not None:
            await asyncio.sleep(0)
            raise fault
        server.under_way += 1
        try:
            async for chunk in self._sampled(server, partial.sampling.max_new_tokens, is_first=is_first):
                yield chunk
        finally:
            server.under_way -= 1

    @staticmethod
    async def _sampled(server, count, *, is_first):
        labels = []
        for place in range(count):
            aborts = server.aborts
            await asyncio.sleep(server.token_s)
            if server.ends_at_abort and server.aborts > aborts:
                yield Chunk([], [], "abort")
                return
            if not is_first:
                await server.is_open.wait()
            if not server.is_healthy:
                raise ServerLostError("broke off")
            labels.append((server.label, place, place + 1))
            is_last = place == count - 1
            yield Chunk([int(server.version)], [-0.5], "length" if is_last else None, list(labels) if is_last else None)

    async def stop(self, connection, mode):
        self.of(connection).is_open.clear()

    async def resume(self, connection):
        self.of(connection).is_open.set()

    async def abort(self, connection):
        self.of(connection).aborts += 1

    async def _take_over(self, connection, label):
        server = self.of(connection)
        await server.update_may_go_on.wait()
        await asyncio.sleep(server.loading_s)
        if server.update_fault is not None:
            raise server.update_fault
        self._label(server, label)

    async def load(self, connection, folder, label, mode):
        await self._take_over(connection, label)

    async def receive(self, connection, group, tensors, label, mode):
        await self._take_over(connection, label)

    async def join_group(self, connection, group, first_rank):
        if self.of(connection).joins_never:
            await asyncio.Event().wait()
        if self.of(connection).cannot_join:
            raise UpdateRefusedError("cannot join")

    async def leave_group(self, connection, group):
        self.left.append(group.name)

    async def begin_reading(self, connection):
        self._note_reading(connection, "begin")

    async def read(self, connection, tensors, copies):
        self._note_reading(connection, "read", [tensor.name for tensor in tensors], copies)

    async def end_reading(self, connection, label):
        self._note_reading(connection, "end", label)
        await super().end_reading(connection, label)

    def _note_reading(self, connection, call, *values):
        server = self.of(connection)
        assert server.has_memory
        server.readings.append((call, *values))
        if call in server.reading_faults:
            raise server.reading_faults[call]

    async def sleep(self, connection):
        server = self.of(connection)
        if server.release_fault is not None:
            raise server.release_fault
        server.has_memory = False

    async def wake_up(self, connection):
        server = self.of(connection)
        assert not server.has_memory  # a server dies of being given back what it has
        server.has_memory = True


def write_weights(folder):
    folder.mkdir(parents=True, exist_ok=True)
    header = json.dumps({"weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 64}))
    return folder


def request(name="r", most=TOKENS, affinity=""):
    return GenerationRequest(name, [1, 2], SamplingParameters(max_new_tokens=most), 0, affinity)


async def until(condition, what, seconds=60.0):
    try:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"waited in vain for: {what}") from None


def states(fleet):
    return {name: str(member.state) for name, member in fleet.pool.servers.items()}


@pytest.fixture
def running(tmp_path, monkeypatch):
    """`async with running({name: FakeServer}) as fleet`: a fleet of servers that somebody else started."""
    monkeypatch.setattr(lifecycle, "RETRY_PAUSES_S", dict.fromkeys(lifecycle.RETRY_PAUSES_S, (0.05, 0.05)))
    monkeypatch.setattr(lifecycle, "POLL_S", 0.02)
    monkeypatch.setattr(lifecycle, "RECOVERY_S", 0.2)
    model = write_weights(tmp_path / "model")

    @asynccontextmanager
    async def run(servers, driver=None, gpus=None, /, **settings):
        by_address = {f"http://{name}": server for name, server in servers.items()}
        if driver is not None:
            driver.by_address = by_address
        defaults = {"servers": {"minimum": len(servers), "maximum": 0}, "addresses": list(by_address)}
        defaults |= {"health_interval_s": 0.02, "start_timeout_s": 120.0, "drain_timeout_s": 1.0}
        adapter = FakeAdapter(FleetSettings(**{**defaults, **settings}), by_address)
        fleet = ServerFleet(adapter, tmp_path / "logs", driver, gpus)
        try:
            fleet.first_weights = model
            await fleet.start(ModelReference(str(model), "float32"))
            yield fleet
        finally:
            await fleet.close()

    run.server, run.write_weights, run.adapter = FakeServer, write_weights, FakeAdapter(FleetSettings(), {})
    run.log = (tmp_path / "logs" / "servers.jsonl").read_text
    run.request, run.until, run.states = request, until, states
    return run


class FakeDriver:
    """The driver's part for servers: what starts at once, and again after an end, takes the next fate.

    A fate is a server, or the reason why none will come. In the trainer's turn nothing is started.
    """

    def __init__(self, *fates, starts=1, host="127.0.0.1"):
        self.host = host
        self.fates = list(fates)
        self.starts = starts
        self.by_address = {}
        self.servers = {}
        self.serving = {}
        self.failed = {}
        self.told = []
        self.waiting = []
        self.is_trainers_turn = False

    def watch(self, role, changed):
        assert role == "server"
        self.changed = changed
        for number in range(self.starts):
            self.start(f"server-{number}")

    def report(self):
        self.changed(RoleMembers("server", tuple(self.serving.values()), dict(self.failed)))

    def start(self, name, is_fresh=True):
        if self.is_trainers_turn:
            self.waiting.append(name)
            return
        fate = self.fates.pop(0)
        if isinstance(fate, str):
            self.failed[name] = fate
        else:
            address = f"http://{self.host}:{len(self.by_address) + 1}"
            self.servers[name] = self.by_address[address] = fate
            self.serving[name] = ServingMember(name, address, is_fresh)
        self.report()

    def end(self, name, is_again=True):
        self.servers.pop(name).is_healthy = False
        del self.serving[name]
        self.report()
        if is_again:
            self.start(name)

    def log(self, text):
        self.told.append(text)

    def notify(self, message):
        self.told.append(message)
        if isinstance(message, RestartMember):
            self.end(message.name)
        elif isinstance(message, ColocatedTraining):
            self.is_trainers_turn = message.is_active
            while self.waiting and not self.is_trainers_turn:
                self.start(self.waiting.pop(0))

    def request(self, message, timeout_s, waiting_for):
        self.notify(message)
        done = Future()
        done.set_result(None)
        return done


@pytest.fixture
def own(running):
    """`starting, driver = own(*fates)`, then `async with starting as fleet`: servers that the run starts."""

    def run(*fates, starts=1, gpus=None, **settings):
        driver = FakeDriver(*fates, starts=starts)
        return running({}, driver, gpus, **{"servers": 1, "addresses": [], **settings}), driver

    return run
