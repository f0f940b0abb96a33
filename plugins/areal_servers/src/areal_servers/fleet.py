"""A fleet of inference servers as one inference engine.

Every server has a task that tends it for as long as the run lasts: bring it up, see that it is the right model and
holds the current weights, watch it, and after a loss begin again. Requests take a place on a ready server; when that
server is stopped, lost or taken out, they go on elsewhere with the tokens they had.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.errors import RunError
from areal_core.interfaces.inference import WeightUpdate
from areal_servers.answer import Answer
from areal_servers.broadcast import BroadcastGroups
from areal_servers.checks import check_request
from areal_servers.connection import ServerConnection
from areal_servers.interface import (
    RequestRefusedError,
    ServerLostError,
    UpdateRefusedError,
)
from areal_servers.member import Member, State
from areal_servers.process import ServerProcess
from areal_servers.registry import Registry
from areal_servers.routing import Router
from areal_servers.tending import Tending
from areal_servers.weight_files import check_fit, describe_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.interfaces.inference import BroadcastGroup, Generation, GenerationRequest
    from areal_core.interfaces.model import ModelReference
    from areal_servers.interface import ServerAdapter
    from areal_servers.settings import FleetSettings

MOST_LOSSES = 4
"""A request that so many servers in a row were lost under is not given to another one: it may be what kills them."""
MOST_EMPTY_PIECES = 20
REGISTRY_INTERVAL_S = 0.5
WATCH_INTERVAL_S = 0.25


class ServerFleet:
    """An `InferenceEngine` whose requests are answered by HTTP servers.

    Args:
        settings: of the fleet.
        adapter: speaks to servers of one kind.
        log_dir: for the logs of server processes and the list of transitions, `servers.jsonl`.
        run_dir: where other processes announce servers; None where nobody may join.
        gpus: of this machine that servers of the run may use; None leaves the choice to the environment.
    """

    def __init__(
        self,
        settings: FleetSettings,
        adapter: ServerAdapter,
        log_dir: Path,
        run_dir: Path | None = None,
        gpus: Sequence[int] | None = None,
    ) -> None:
        self.capabilities = adapter.capabilities()
        self.adapter = adapter
        self._settings = settings
        self._log_dir = Path(log_dir)
        self._registry = Registry(run_dir) if run_dir is not None else None
        self.gpus = gpus
        self._router = Router(settings.max_concurrent_requests)
        self._broadcast = BroadcastGroups(adapter)
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._keeper: asyncio.Task[None] | None = None
        self._updating = asyncio.Lock()
        self._events: Counter[str] = Counter()
        self._timings: dict[str, float] = {}
        self._vocabulary = 1 << 31
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._missed = False
        self._closed = False
        self.current: WeightUpdate | None = None
        """What every server must hold before it is given a request; its path is None while only a broadcast was."""

    # The engine as the controller sees it.

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`: returns when `min_servers` are ready."""
        folder = Path(model.path)
        try:
            description: dict[str, Any] = json.loads((folder / "config.json").read_text())
            self._shapes = describe_folder(folder)
        except (OSError, ValueError) as error:
            raise RunError(
                f"servers need the model as a local folder, and {folder} is none: {error}",
                hints=["download it first and set model.path to the folder"],
            ) from None
        self._vocabulary = int(description.get("vocab_size", 1 << 31))
        self.current = WeightUpdate(0, folder)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        tending = Tending(self, self._settings, model, description)
        ranks = self._settings.ranks
        for number in range(self._settings.servers):
            gpus = None if self.gpus is None else self.gpus[number * ranks : (number + 1) * ranks]
            log = self._log_dir / f"{self.adapter.name.lower()}-{number}.log"
            self._add(f"server-{number}", "", tending, ServerProcess(log, gpus))
        for address in self._settings.addresses:
            self._add(address.split("//")[1], address, tending)
        self._keeper = asyncio.create_task(self._keep(tending))
        try:
            await self._wait_for_servers()
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceEngine.generate`."""
        used = [m.identity for m in self._members.values() if m.identity and m.state not in (State.REFUSED, State.GONE)]
        context = min((identity.context for identity in used), default=1 << 31)
        check_request(request, self._vocabulary, context, self.capabilities.sampling)
        answer = Answer(request)
        losses: list[Member] = []
        empty = 0
        while answer.finish is None:
            member = await self._router.take(request.affinity, losses, is_continued=answer.pieces > 0)
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
                self._events["failed"] += 1
                self.doubt(member, str(error))
                if len(losses) == MOST_LOSSES:
                    raise ValueError(
                        f"{MOST_LOSSES} servers failed under this request; the last one: {error}"
                    ) from None
            except RequestRefusedError as error:
                raise ValueError(f"{member.name} {error}") from None
            finally:
                self._router.release(member)
            self._events["pieces"] += 1
        self._events["continued"] += answer.pieces - 1
        return answer.generation()

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """See `InferenceEngine.generate_everywhere`: one answer of each server that is ready."""
        answers = [(member, Answer(replace(request, request_id=f"{request.request_id}-{member.name}")))
                   for member in self._router.ready]  # fmt: skip
        for member, answer in answers:
            member.take()
            try:
                await member.work(answer)
            except ServerLostError as error:
                self.doubt(member, str(error))
            finally:
                self._router.release(member)
        return [answer.generation() for _, answer in answers if answer.finish is not None]

    async def update_weights(self, update: WeightUpdate) -> None:
        """See `InferenceEngine.update_weights`: servers that fail are taken out and catch up later."""
        found = describe_folder(update.path) if update.path is not None else update.tensors
        check_fit(found, self._shapes)
        async with self._updating:
            await self._broadcast.joined()
            # Those without memory have been waiting for this since they gave it away.
            live = [m for m in self._members.values() if m.state in (State.READY, State.UPDATING)]
            members = [m for m in live if update.path is not None or m.group is not None]
            for member in live:
                member.state = State.UPDATING
            faults = await asyncio.gather(*(self._update(member, update) for member in members))
            # Servers that only went away catch up from the folder when they are back.
            if all(faults) and not all(isinstance(f, ServerLostError) and update.path is not None for f in faults):
                for member in live:
                    if member.state is State.UPDATING and member.has_memory:
                        member.state = State.READY  # nobody touched it: it holds the former version
                self._router.wake()
                raise RunError(f"no server took over the weights of version {update.version}; see {self._log_dir}")
            self.current = update
            self._missed = self._missed and update.path is None  # who waits for a folder waits on behind a broadcast
            for member in self._members.values():
                if member.state is State.UPDATING and member.version == update.version:
                    member.state = State.READY
                elif member.state is State.UPDATING:
                    self.lose(member, "was not in the group of the broadcast")
            self._router.wake()

    async def _update(self, member: Member, update: WeightUpdate) -> Exception | None:
        """What went wrong, None for nothing."""
        try:
            seconds = await member.update(update, self._settings.update_timeout_s)
        except (ServerLostError, UpdateRefusedError, RequestRefusedError) as error:
            self.lose(member, f"did not take over version {update.version}: {error}")
            return error
        self._timings = {f"publish/{name}": max(value, self._timings.get(f"publish/{name}", 0.0))
                         for name, value in seconds.items()}  # fmt: skip
        return None

    def describe(self) -> str:
        """See `InferenceEngine.describe`."""
        states = Counter(str(member.state) for member in self._members.values())
        requests = sum(member.requests for member in self._members.values())
        return f"{', '.join(f'{count} {state}' for state, count in sorted(states.items()))}; {requests} requests"

    def take_metrics(self) -> dict[str, float]:
        """See `InferenceEngine.take_metrics`."""
        ready = self._router.ready
        versions = [member.version for member in ready]
        metrics = {f"servers/{name}": float(count) for name, count in self._events.items()} | self._timings
        metrics["servers/ready"] = float(len(ready))
        metrics["servers/version_skew"] = float(max(versions) - min(versions)) if versions else 0.0
        self._events.clear()
        self._timings = {}
        return metrics

    async def close(self) -> None:
        """See `InferenceEngine.close`: servers that the run started end, all others go on."""
        self._closed = True
        self._router.fail(RunError("the servers were closed"))
        tasks = [*self._tasks.values(), *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for member in self._members.values():
            await member.connection.close()
        await asyncio.gather(*(m.process.end() for m in self._members.values() if m.process))

    # Weights by broadcast and shared memory; see `BroadcastReceiver` and `MemorySharer`.

    async def form_group(self, address: str, port: int, backend: str, standing: str) -> BroadcastGroup | None:
        """See `BroadcastReceiver.form_group`."""
        return await self._broadcast.form(self._router.ready, address, port, backend, standing)

    def needs_folder(self) -> bool:
        """See `BroadcastReceiver.needs_folder`."""
        return self._missed and self.current is not None and self.current.path is None

    def offer_folder(self, update: WeightUpdate) -> None:
        """See `BroadcastReceiver.offer_folder`."""
        if self.current is not None and self.current.version == update.version:
            self.current, self._missed = update, False

    def miss(self) -> None:
        """A server waits for the current weights in a folder."""
        self._missed = True

    async def release_memory(self) -> None:
        """See `MemorySharer.release_memory`."""
        async with self._updating:
            await asyncio.gather(*(self._release(member) for member in self._router.ready))

    async def _release(self, member: Member) -> None:
        member.state = State.UPDATING
        try:
            await member.release_memory()
        except (ServerLostError, RequestRefusedError) as error:
            self.lose(member, f"did not give its memory away: {error}")
            if member.process is not None:
                await member.process.end()  # the trainer counts on this memory

    # The life of servers.

    def _add(self, name: str, address: str, tending: Tending, process: ServerProcess | None = None) -> None:
        key = self._settings.api_key.get() if self._settings.api_key is not None else ""
        connection = ServerConnection(address, key, self._settings.silence_timeout_s)
        member = Member(name, self.adapter, connection, self._settings.update_mode, process)
        self._members[name] = member
        self._router.set_members(self._members.values())
        self._tasks[name] = asyncio.create_task(tending.tend(member))

    def move(self, member: Member, state: State, reason: str = "") -> None:
        """A server enters another state; told once, in the log and in `servers.jsonl`."""
        if member.state is state:
            return
        member.state = state
        entry = {"time": time.time(), "server": member.name, "state": str(state), "version": member.version}
        with (self._log_dir / "servers.jsonl").open("a") as file:
            file.write(json.dumps(entry | ({"reason": reason} if reason else {})) + "\n")
        sys.stderr.write(f"{member.name} {state}{f': {reason}' if reason else ''}\n")
        sys.stderr.flush()
        self._router.wake()

    def admit(self, member: Member) -> None:
        """A server holds the current weights and may be given requests."""
        member.failures, member.was_ready, member.has_served = 0, True, True
        self.move(member, State.READY)

    @property
    def updating(self) -> asyncio.Lock:
        """Held while weights change; what a server holds can be compared with `current` under it."""
        return self._updating

    def doubt(self, member: Member, reason: str) -> None:
        """A request failed there; after three in a row the server is taken out."""
        member.failures += 1
        member.doubted.set()
        if member.failures >= 3 and member.state in (State.READY, State.LEAVING):
            self.lose(member, reason)

    def lose(self, member: Member, reason: str) -> None:
        """Take a server out; what it works on goes on elsewhere. It must catch up before it is used again."""
        if member.state not in (State.GONE, State.REFUSED):
            self.move(member, State.LOST, reason)
        member.version, member.group = -1, None
        member.doubted.set()
        asyncio.get_running_loop().create_task(member.connection.close())

    def forget(self, member: Member) -> None:
        """A server that nothing is asked of is gone, whatever was being done to bring it up."""
        self._tasks[member.name].cancel()
        self.move(member, State.GONE)

    async def _keep(self, tending: Tending) -> None:
        """Look for servers that join or leave, and end the run where none has been ready for too long."""
        last_ready = time.monotonic()
        while True:
            await asyncio.sleep(REGISTRY_INTERVAL_S)
            if self._registry is not None:
                announced = self._registry.announced()
                for name, address in announced.items():
                    if name not in self._members or self._members[name].state is State.GONE:
                        self._add(name, address, tending)
                for member in list(self._members.values()):
                    if self._registry.knew(member.name) and member.name not in announced:
                        tending.leave(member)
                self._registry.report({name: str(member.state) for name, member in self._members.items()})
            are_waiting = any(not member.has_memory for member in self._members.values())  # for the trainer
            if self._router.ready or self._updating.locked() or are_waiting:
                last_ready = time.monotonic()
            lost_s = time.monotonic() - last_ready
            if lost_s > self._settings.start_timeout_s or not self._possible():
                self._router.fail(RunError(f"no server is left: none was ready for {lost_s:.0f} s; {self._reasons()}"))

    async def _wait_for_servers(self) -> None:
        wanted = self._settings.min_servers
        deadline = time.monotonic() + self._settings.start_timeout_s
        while len(self._router.ready) < wanted:
            if self._possible() < wanted or time.monotonic() > deadline:
                raise RunError(
                    f"{len(self._router.ready)} of {wanted} servers are ready; {self._reasons()}",
                    hints=["min_servers says how many the run needs; start_timeout_s how long it waits for them"],
                )
            await asyncio.sleep(WATCH_INTERVAL_S)

    def _possible(self) -> int:
        """Servers that are ready or may become so."""
        return sum(member.state not in (State.REFUSED, State.GONE) for member in self._members.values())

    def _reasons(self) -> str:
        path = self._log_dir / "servers.jsonl"
        told: dict[str, str] = {}
        for line in path.read_text().splitlines() if path.is_file() else []:
            entry = json.loads(line)
            if "reason" in entry:
                told[entry["server"]] = f"{entry['server']} {entry['state']}: {entry['reason']}"
        return "\n".join(told.values()) or f"still starting; their logs are in {self._log_dir}"
