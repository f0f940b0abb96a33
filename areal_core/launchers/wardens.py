"""The supervisor's end of the wardens: which nodes there are, what runs on them, and how each process fares."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.background import start_task
from areal_core.errors import LostError, RunError
from areal_core.interfaces.launcher import LOST, ProcessEnd
from areal_core.launchers.arrivals import PROGRESS_S, no_word, wait_for_nodes
from areal_core.launchers.nodes import Nodes, name_order
from areal_core.launchers.shared_folder import who_cannot_see
from areal_core.launchers.supervised import Node, SupervisedProcess, beat_interval
from areal_core.messages import Channel, serve
from areal_core.messages.processes import (
    Alive,
    Beat,
    EndProcess,
    FindPort,
    Found,
    Leave,
    NodeBeat,
    NodeLeft,
    NodeNotice,
    ProcessEnded,
    StartProcess,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from areal_core.interfaces.launcher import Launcher, ProcessSpecification
    from areal_core.messages import Credentials, Server

LEASE_S = 60.0
"""Silence of the supervisor after which a warden ends everything, and of a node after which it counts as lost."""
MARGIN_S = 15.0
"""Beyond the lease: for a warden's last processes to end."""
PORT_TIMEOUT_S = 30.0
END_TIMEOUT_S = 30.0
LET_GO_S = 10.0
"""For processes to end by themselves whose node is about to be taken away."""
LAST_WORDS_S = 5.0
"""For what an ended process has said to arrive."""
SUPERVISOR_VARIABLE, NAME_VARIABLE, BEAT_VARIABLE = "AREAL_SUPERVISOR", "AREAL_PROCESS", "AREAL_BEAT_S"
"""Where a process that speaks finds its supervisor, its own name, and how often it beats."""


class Wardens:
    """Listens for wardens and processes, tells them what to do, and hears what becomes of them.

    Args:
        credentials: of the run; those of a new epoch may take their place.
        on_message: called with what a process says, and the number under which it waits for a reply.
        on_end: called with a process that has ended.
        on_notice: called with a node that is about to be taken away, and the signal that said so.
        on_visitor: serves a connection of somebody else.

    Attributes:
        nodes: those that are there, by name.
        has_gone: whether one was that is not there any more.
        has_lost: whether one was lost on which an essential process ran.
        processes: by name.
        is_closing: whether the run ends here, and waits for nodes to confirm it.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        on_message: Callable[[SupervisedProcess, Any, int], None],
        on_end: Callable[[SupervisedProcess, ProcessEnd], None],
        on_notice: Callable[[Node, int], None],
        on_visitor: Callable[[Channel], Awaitable[None]],
    ) -> None:
        self.credentials = credentials
        self._on_message = on_message
        self._on_end = on_end
        self._on_notice = on_notice
        self._on_visitor = on_visitor
        self._server: Server | None = None
        self._numbered = Nodes()
        self._folder = Path()
        self.address = ""
        self.nodes: dict[str, Node] = {}
        self._checked: dict[str, Node] = {}
        """Nodes that have come late, while it is looked whether they see the run's folder."""
        self._unconfirmed: dict[str, Node] = {}
        """Nodes that had joined and are lost: what ran there may run for as long as their lease."""
        self.has_gone = self.has_lost = self.is_closing = False
        self._is_over = asyncio.Event()
        self._say: Callable[[str], None] = print
        self.processes: dict[str, SupervisedProcess] = {}

    async def listen(self, host: str) -> None:
        """Listen on a free port; `address` says which."""
        self._server = await serve(f"tcp:{host}:0", self._serve, lambda: self.credentials)
        self.address = self._server.address
        start_task(self._beat(), "beats for the wardens")

    async def bring(self, launcher: Launcher, say: Callable[[str], None], folder: Path) -> None:
        """Have the launcher bring its wardens, and wait until they have come, or are known not to.

        A node that fails is left out, and told: whether the others are enough is seen when processes are placed.

        Args:
            launcher: brings them.
            say: told of nodes that are left out, come late or go, and now and then of those that are waited for.
            folder: of the run, which all nodes must see; a folder of its own is made there and removed.

        Raises:
            RunError: none came.
        """
        command = [sys.executable, "-m", "areal_core.launchers.warden", self.address, str(LEASE_S)]
        self._say = say
        count = await asyncio.to_thread(launcher.bring, command, self.credentials.as_environment())
        lost = await wait_for_nodes(launcher, count, self.nodes, say, folder)
        self._folder, seen = folder, set[Node]()
        while unseen := {name: node for name, node in self.nodes.items() if node not in seen}:
            seen |= {*unseen.values()}
            for name, reason in (await who_cannot_see(folder, {n: node.channel for n, node in unseen.items()})).items():
                lost[name] = reason
                say(f"the node {name} is left out: {reason}")
                await unseen[name].dismiss()
                if self.nodes.get(name) is unseen[name]:
                    del self.nodes[name]
        if not self.nodes:
            reasons = "; ".join(f"{lone}: {reason}" for lone, reason in lost.items()) or "none has reported"
            raise RunError(f"no process can be started on any node: {reasons}")
        self._numbered = Nodes()
        for name in sorted(self.nodes, key=name_order):
            self._numbered.add(name, self.nodes[name].ready.gpus)

    def spread(self, count: int, gpus: Sequence[int] | None) -> list[str]:
        """The name of the node of each of `count` ranks; see `Nodes.spread`."""
        return self._numbered.spread(count, gpus)

    def gpus_on(self, node: Node, gpus: Sequence[int] | None) -> tuple[int, ...] | None:
        """Those of some GPUs that a node has; None where none are named."""
        if gpus is None or not any(self._numbered.gpus.values()):
            return None if gpus is None else tuple(gpus)
        return tuple(gpu for gpu in gpus if self._numbered.node_of(gpu) == node.name)

    async def find_place(self, gpus: tuple[int, ...] | None, spare: int | None = None) -> Found:
        """Where a process can listen; see `Processes.find_place`, and `Needs`."""
        if spare is None:
            name = self._numbered.choose(gpus, self._load())
        else:
            live = [process for process in self.processes.values() if not process.ended.done()]
            held = {gpu for process in live for gpu in self._held_by(process)}
            served = {process.node.name for process in live if process.specification.port}
            name, gpus = self._numbered.find_room(spare, gpus, held, served)
        node = self.nodes[name]
        port = await node.channel.request(FindPort(), PORT_TIMEOUT_S, f"a free port of {node.name}")
        return Found(node.name, node.ready.address, port.number, gpus)

    def _held_by(self, process: SupervisedProcess) -> Collection[int]:
        """GPUs that are not free while a process runs: a rank that names none takes what it sees."""
        needs, name = process.specification.needs, process.node.name
        if needs.gpus is None and process.specification.role == "trainer" and name in self._numbered.gpus:
            return self._numbered.numbers_on(name)
        return needs.gpus or ()

    def adopt(self, owner: str, name: str) -> Found:
        """Where a process runs that was started for one called `owner`; see `Processes.adopt`."""
        process = self.processes.get(name)
        if process is None or process.owner != owner or process.ended.done():
            return Found("", "", 0)
        return Found(process.node.name, process.node.ready.address, process.specification.port)

    async def begin_epoch(self, credentials: Credentials, keep: Callable[[SupervisedProcess], bool]) -> None:
        """End all processes but some, and accept only those of a new epoch from now on.

        Raises:
            LostError: one has not ended in time, or a node was lost: what runs there cannot be known.
        """
        deadline = time.monotonic() + END_TIMEOUT_S
        # What one of them had asked for may be started after it has ended.
        while ending := [p for p in self.processes.values() if not p.ended.done() and not keep(p)]:
            for process in ending:
                process.node.post(EndProcess(process.name, 0.0))
            _, left = await asyncio.wait([p.ended for p in ending], timeout=deadline - time.monotonic())
            if left:
                raise LostError(f"{len(left)} processes have not ended within {END_TIMEOUT_S:g} s")
        if self.has_lost:
            raise LostError("a node was lost")
        self.credentials = credentials
        self.processes = {name: p for name, p in self.processes.items() if not p.ended.done()}

    def _load(self) -> Callable[[str], int]:
        """How many processes run on a node, by its name."""
        return Counter(process.node.name for process in self.processes.values() if not process.ended.done()).__getitem__

    def _node_for(self, specification: ProcessSpecification) -> Node:
        """Raises: RunError: it is not there."""
        beside = self.processes.get(specification.beside)
        name = specification.node or (beside.node.name if beside is not None else "")
        if not name and not specification.beside:
            name = self._numbered.choose(specification.needs.gpus, self._load())
        if name not in self.nodes:
            where = f"the node {name} is" if name else f"{specification.beside}, beside which it must stand, is"
            raise RunError(f"there is no node for the process {specification.name}: {where} not there")
        return self.nodes[name]

    def start(self, specification: ProcessSpecification, log: Path, owner: str = "") -> SupervisedProcess:
        """Start a process on the node that it needs; returns at once.

        Args:
            specification: of the process.
            log: file for its output.
            owner: name of the process that asked for it.

        Raises:
            RunError: there is no such node.
        """
        node = self._node_for(specification)
        process = self.processes[specification.name] = SupervisedProcess(specification, node, owner)
        needs = specification.needs
        environment = {**self.credentials.as_environment(), **specification.environment}
        if needs.cores:
            environment.setdefault("OMP_NUM_THREADS", str(needs.cores))
        if specification.speaks:
            environment |= {SUPERVISOR_VARIABLE: self.address, NAME_VARIABLE: process.name}
            environment[BEAT_VARIABLE] = str(beat_interval(len(self.processes)))
        gpus = self._numbered.local(node.name, needs.gpus)
        program, *words = specification.command
        # A node may have its own Python, in a container for instance.
        program = node.ready.python if program == sys.executable else program
        node.post(StartProcess(process.name, (program, *words), environment, str(log), gpus))
        return process

    def let_go(self, node: Node) -> None:
        """Do without a node that is about to be taken away; it may say so twice."""
        if self.nodes.get(node.name) is node:
            self._forget(node)
            start_task(self._end_all_on(node), f"letting go of {node.name}")

    async def _end_all_on(self, node: Node) -> None:
        """End what runs there, and its warden with it."""
        running = self._running_on(node)
        self._say(f"the run goes on without {node.name}; ended there: {', '.join(running) or 'nothing'}")
        for name in running:
            node.post(EndProcess(name, LET_GO_S))
        if running:
            await asyncio.wait([self.processes[name].ended for name in running], timeout=END_TIMEOUT_S)
        node.has_left = all(self.processes[name].ended.done() for name in running)
        await node.channel.close()

    def _forget(self, node: Node) -> None:
        del self.nodes[node.name]
        self._numbered.gpus.pop(node.name, None)
        self.has_gone = True

    @property
    def awaited(self) -> dict[str, float]:
        """Nodes that nobody can end from here, for a run that ends: each with the seconds that its lease still has."""
        ends = {name: node.heard + LEASE_S + MARGIN_S for name, node in {**self._unconfirmed, **self.nodes}.items()}
        return {name: left_s for name, end in ends.items() if (left_s := end - time.monotonic()) > 0}

    async def close(self) -> None:
        """Let go of all nodes: their wardens end everything.

        Those that have joined, which no launcher can end, confirm it, or their lease is waited for; also that of those
        that were lost.
        """
        self.is_closing, nodes = True, self.nodes
        self.nodes = {name: node for name, node in nodes.items() if node.ready.has_joined}
        began = told = time.monotonic()
        for node in nodes.values():
            node.heard = began  # its lease begins with the last that it hears
            node.post(Leave())
            if not node.ready.has_joined:
                await node.channel.close()
        while left := self.awaited:
            if (now := time.monotonic()) - told > PROGRESS_S:
                told = now
                self._say(no_word(left))
            await asyncio.sleep(0.02)
        silent, self.nodes = self.nodes, {}
        for node in silent.values():
            await node.channel.close()
        if self._server is not None:  # until now somebody may have asked how the run is
            self._server.close()
        self._is_over.set()

    async def _serve(self, channel: Channel) -> None:
        """Whoever has come, until it goes."""
        process = self.processes.get(channel.peer)
        if channel.peer == "warden":
            await self._serve_warden(channel)
        elif process is not None and process.channel is None:
            process.channel = channel
            try:
                while True:
                    self._hear(process, *await channel.receive_request())
            finally:
                process.fell_silent.set()
        else:
            await self._on_visitor(channel)

    async def _serve_warden(self, channel: Channel) -> None:
        node = Node(channel, await channel.receive())
        if self.is_closing:  # it has nothing to do here, and the next epoch to wait for
            node.post(Leave())
            await self._is_over.wait()
            return
        while node.name in self.nodes or node.name in self._checked:
            node.name += "'"
        self._tell_of_twin(node)
        if self._numbered.gpus and not await self._may_come_late(node):
            node.post(Leave())
            return
        self.nodes[node.name] = node
        try:
            while True:
                self._hear_of_node(node, await channel.receive())
        finally:
            ended = self._running_on(node)
            if node.ready.has_joined and not node.has_left:
                self._unconfirmed[f"{node.name} (lost)"] = node
            if self.nodes.get(node.name) is node:
                self._forget(node)
                if not self.is_closing:  # when it has left as it was told to
                    self.has_lost |= any(self.processes[name].is_essential for name in ended)
                    self._say(f"the node {node.name} is lost, and with it: {', '.join(ended) or 'nothing'}")
            # Whatever runs there has ended, or will within the lease.
            for name in ended:
                self._set_end(self.processes[name], ProcessEnd(LOST, ""))

    def _tell_of_twin(self, node: Node) -> None:
        twins = [one.name for one in self.nodes.values() if one.ready.host == node.ready.host]
        if twins and node.ready.has_joined and node.ready.gpus:
            self._say(f"{node.name} and {twins[0]} are the same machine: hide the GPUs of each from the other")

    def _hear_of_node(self, node: Node, message: Any) -> None:
        node.heard = time.monotonic()
        match message:
            case ProcessEnded() if (process := self.processes.get(message.name)) is not None:
                start_task(self._has_ended(process, message), f"end of {message.name}")
            case NodeBeat():
                self._note_stopped(node, message.stopped)
            case NodeNotice():
                self._on_notice(node, message.number)
            case NodeLeft():
                node.has_left = True

    async def _may_come_late(self, node: Node) -> bool:
        """Whether a node that was not there at the beginning sees the run's folder; its GPUs are counted then."""
        self._checked[node.name] = node
        try:
            problem = (await who_cannot_see(self._folder, {node.name: node.channel})).get(node.name)
        except RunError as error:
            problem = error.message
        finally:
            del self._checked[node.name]
        if problem:
            self._say(f"the node {node.name}, which came late, is left out: {problem}")
        if problem or self.is_closing:
            return False
        self._numbered.add(node.name, node.ready.gpus)
        self._say(f"the node {node.name} has come, with {node.ready.gpus} GPUs")
        return True

    def _running_on(self, node: Node) -> list[str]:
        """Names of the processes of a node that have not ended."""
        return [name for name, one in self.processes.items() if one.node is node and not one.ended.done()]

    def _note_stopped(self, node: Node, stopped: tuple[str, ...]) -> None:
        if not stopped and not node.stopped:
            return  # as nearly always, and there may be thousands
        node.stopped = stopped
        for process in self.processes.values():
            if process.node is node:
                is_stopped = process.name in stopped
                process.stopped_at = (process.stopped_at or time.monotonic()) if is_stopped else None

    def _hear(self, process: SupervisedProcess, message: Any, number: int) -> None:
        process.heard = time.monotonic()
        if isinstance(message, Alive):
            process.phase = message
        else:
            self._on_message(process, message, number)

    async def _has_ended(self, process: SupervisedProcess, ended: ProcessEnded) -> None:
        """What it said before comes first."""
        if process.channel is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_S):
                    await process.fell_silent.wait()
        self._set_end(process, ProcessEnd(ended.code, ended.last_words))

    def _set_end(self, process: SupervisedProcess, end: ProcessEnd) -> None:
        if not process.ended.done():
            process.ended.set_result(end)
            self._on_end(process, end)

    async def _beat(self) -> None:
        while True:
            every_s = beat_interval(len(self.nodes))
            await asyncio.sleep(every_s)
            for node in [] if self.is_closing else [*self.nodes.values(), *self._checked.values()]:
                node.post(Beat(every_s))
                if time.monotonic() - node.heard > LEASE_S:
                    await node.dismiss()  # it is lost, and its warden must not come back
