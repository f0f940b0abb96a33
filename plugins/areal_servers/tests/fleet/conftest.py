"""Servers that are objects of this process and fail when they are told to."""

from __future__ import annotations

import asyncio
import json
import struct
from contextlib import asynccontextmanager

import pytest

from areal_core.errors import RunError
from areal_core.interfaces import (
    GenerationRequest,
    InferenceCapabilities,
    ModelReference,
    Place,
    ProcessEnd,
    SamplingParameters,
    TensorDescription,
)
from areal_servers import tending
from areal_servers.errors import ServerLostError, UpdateRefusedError
from areal_servers.fleet import ServerFleet
from areal_servers.interface import Chunk, ServerCommand, ServerIdentity
from areal_servers.settings import FleetSettings

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
        self.cannot_join = self.joins_never = False
        self.has_memory = True
        self.release_fault = None
        self.pieces = []
        self.cache_keys = []
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.update_may_go_on = asyncio.Event()
        self.update_may_go_on.set()


class FakeConnection:
    """What the fleet needs of a connection."""

    def __init__(self, address, servers):
        self.address = address
        self.servers = servers

    async def get(self, path, timeout_s=None):
        server = self.servers.get(self.address)
        if server is None or not server.is_healthy:
            raise ServerLostError("/health: ClientConnectorError")
        if server.health_fault is not None:
            raise server.health_fault

    async def close(self):
        pass


class FakeAdapter:
    """Speaks to fake servers."""

    name = "Fake"
    health_path = "/health"
    group_store_prefixes = {"gloo": ("{group}",)}  # noqa: RUF012

    def __init__(self, servers):
        self.servers = servers
        self.left = []

    def capabilities(self):
        return InferenceCapabilities(frozenset({"keep_cache", "recompute"}), broadcast=True)

    def of(self, connection):
        return self.servers[connection.address]

    def command(self, model, host, port):
        return ServerCommand([host, str(port)])

    async def set_label(self, connection, label):
        self._label(self.of(connection), label)

    @staticmethod
    def _label(server, label):
        server.label, server.version = label, label.rpartition("-")[2]

    async def identify(self, connection):
        return self.of(connection).identity

    async def generate(self, connection, piece):
        server = self.of(connection)
        is_first = piece.name.startswith("first-")
        server.pieces.append(piece.name)
        server.cache_keys.append(piece.cache_key)
        fault = server.first_fault if is_first else server.fault
        if fault is not None:
            await asyncio.sleep(0)
            raise fault
        labels = []
        count = piece.sampling.max_new_tokens
        for place in range(count):
            await asyncio.sleep(0.001)
            if not is_first:
                await server.is_open.wait()
            labels.append((server.label, place, place + 1))
            is_last = place == count - 1
            yield Chunk([int(server.version)], [-0.5], "length" if is_last else None, list(labels) if is_last else None)

    async def stop(self, connection, mode):
        self.of(connection).is_open.clear()

    async def resume(self, connection):
        self.of(connection).is_open.set()

    async def abort(self, connection):
        pass

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

    async def release_memory(self, connection):
        server = self.of(connection)
        if server.release_fault is not None:
            raise server.release_fault
        server.has_memory = False

    async def restore_memory(self, connection):
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
    return {name: str(member.state) for name, member in fleet.roster.members.items()}


@pytest.fixture
def running(tmp_path, monkeypatch):
    """`async with running({name: FakeServer}) as fleet`: a fleet of servers that somebody else started."""
    monkeypatch.setattr(tending, "PAUSES_S", dict.fromkeys(tending.PAUSES_S, (0.05, 0.05)))
    monkeypatch.setattr(tending, "POLL_S", 0.02)
    model = write_weights(tmp_path / "model")

    @asynccontextmanager
    async def run(servers, processes=None, /, **settings):
        by_address = {f"http://{name}": server for name, server in servers.items()}
        if processes is not None:
            processes.by_address = by_address
        monkeypatch.setattr(tending, "ServerConnection", lambda address, *_: FakeConnection(address, by_address))
        defaults = {"servers": {"minimum": len(servers), "maximum": 0}, "addresses": list(by_address)}
        defaults |= {"health_interval_s": 0.02, "start_timeout_s": 120.0, "drain_timeout_s": 1.0}
        adapter = FakeAdapter(by_address)
        fleet = ServerFleet(FleetSettings(**{**defaults, **settings}), adapter, tmp_path / "logs", processes)
        try:
            fleet.first_weights = model
            await fleet.start(ModelReference(str(model), "float32"))
            yield fleet
        finally:
            await fleet.close()

    run.server, run.write_weights = FakeServer, write_weights
    run.log = (tmp_path / "logs" / "servers.jsonl").read_text
    run.request, run.until, run.states = request, until, states
    return run


class FakeProcess:
    """A server of this process; it ends when it is told to."""

    def __init__(self, name, server):
        self.name = name
        self.server = server
        self._over = asyncio.get_running_loop().create_future()

    def die(self, code, words):
        if self.server is not None:
            self.server.is_healthy = False
        if not self._over.done():
            self._over.set_result(ProcessEnd(code, words))

    @property
    def is_running(self):
        return not self._over.done()

    async def wait(self):
        return await asyncio.shield(self._over)

    async def end(self, grace_s=0.0):
        self.die(-15, "")
        return await self.wait()


class FakeProcesses:
    """Each start takes the next fate: a server, or the words of one that ends at once, or an error."""

    def __init__(self, *fates):
        self.address = "127.0.0.1"
        self.fates = list(fates)
        self.specifications = []
        self.started = []
        self.by_address = {}
        self.ports = 0
        self.rooms = self.most_at_once = 0
        self.asked = []

    async def adopt(self, name):
        return None

    async def find_place(self, needs):
        self.asked.append(needs)
        at_once = sum(process.is_running for process in self.started)
        await asyncio.sleep(0.01)
        if needs.spare is not None and self.rooms <= at_once:
            raise RunError("no node has room")
        self.ports += 1
        return Place("", self.address, self.ports)

    async def start(self, specification):
        self.specifications.append(specification)
        fate = self.fates.pop(0)
        if isinstance(fate, Exception):
            raise fate
        server = None if isinstance(fate, str) else fate
        process = FakeProcess(specification.name, server)
        host, port = specification.command
        if server is not None:
            self.by_address[f"http://{host}:{port}"] = server
        else:
            process.die(1, fate)
        self.started.append(process)
        self.most_at_once = max(self.most_at_once, sum(process.is_running for process in self.started))
        return process


@pytest.fixture
def own(running, monkeypatch):
    """`async with own(*fates) as (fleet, processes)`."""

    def run(*fates, address="127.0.0.1", rooms=0, **settings):
        processes = FakeProcesses(*fates)
        processes.address, processes.rooms = address, rooms
        settings = {"servers": 1, "addresses": [], **settings}
        return running({}, processes, **settings), processes

    return run
