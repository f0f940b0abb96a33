"""True servers that are killed, stopped, cut off, slow or wrong, under load: nothing is lost, doubled, mislabeled."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from contextlib import asynccontextmanager

import pytest
from safetensors.torch import load_file

from areal_core.config.sections import WeightSyncSection
from areal_core.engines import ModelReference, WeightUpdate
from areal_core.errors import RunError
from areal_core.messages.rollouts import SyncWeights
from areal_core.messages.servers import ServerJoins, ServerLeaves
from areal_core.rollout.service import RolloutService
from areal_core.runtime.rpc import Failed
from areal_core.servers import GenerationRequest, SamplingParameters, ServerFleet
from areal_core.training.broadcast import Broadcast
from areal_core.training.weight_sync import WeightFolder, WeightSync
from areal_sglang.adapter import SGLangAdapter
from areal_sglang.config import SGLangConfig
from areal_testing.conformance.models import make_model

pytestmark = [pytest.mark.servers, pytest.mark.nightly, pytest.mark.timeout(1800)]

BROADCAST_TIMEOUT_S = 60.0
HANG_S = 900


def test_killed_while_it_generates(place, load, wait_until):
    async def check():
        fleet, member = place.fleet, place.member(0)
        async with load(fleet) as requests:
            await requests.more()
            fleet.pop_metrics()
            place.signal(0, signal.SIGKILL)
            await wait_until(lambda: str(member.state) == "lost", "the loss is noticed")
            await fleet.update_weights(place.next_update())
            await requests.more()
            await wait_until(lambda: str(member.state) == "ready", "it was started again")
            assert place.transitions(member.name)[-1]["version"] == place.version
            await wait_until(lambda: member.requests, "it is given requests again")
            await requests.more()
        requests.check(place.log_files)
        metrics = fleet.pop_metrics()
        assert metrics["servers/continued"] >= 1
        assert metrics["servers/failed"] >= 1

    place.run(check())


class Parameters:
    """The trainer's engine, as far as weight sync knows it: the weights of the place's version."""

    def __init__(self, place):
        self.place = place
        self.on_tensor = None

    def named_meta_parameters(self):
        weights = load_file(self.place.models[self.place.version] / "model.safetensors")
        return ((name, value.to("meta")) for name, value in weights.items())

    def named_full_parameters(self):
        weights = load_file(self.place.models[self.place.version] / "model.safetensors")
        for number, (name, value) in enumerate(weights.items()):
            if self.on_tensor is not None:
                self.on_tensor(number)
            yield name, value


class Rollouts:
    """The trainer's end of the messages, without a process between: the core's own service answers for the fleet."""

    def __init__(self, place):
        self._loop = place.loop
        self._service = RolloutService(self, place.fleet, None, dict)
        self._fleet = place.fleet
        self._numbers = itertools.count(1)
        self._replies = {}

    async def sync(self, update, trained):
        """What is asked of the rollout controller here."""
        await self._fleet.update_weights(update)

    def request(self, message):
        number = next(self._numbers)
        self._replies[number] = asyncio.run_coroutine_threadsafe(self._service.answer(message), self._loop)
        return number

    def sync_weights(self, version, trained, tensors=(), folder=None):
        return self.request(SyncWeights(version, trained, folder, tuple(tensors)))

    def wait(self, number):
        reply = self._replies[number].result(HANG_S)
        if isinstance(reply, Failed):
            raise RunError(reply.text)
        return reply

    def call(self, message):
        return self.wait(self.request(message))

    def has_failed(self, number):
        reply = self._replies[number]
        return reply.done() and isinstance(reply.result(), Failed)


class CountingFolder(WeightFolder):
    """Counts the versions that it writes."""

    count = 0

    def write(self, version):
        self.count += 1
        return super().write(version)


def test_killed_in_the_middle_of_a_broadcast(place, load, wait_until, one_rank, tmp_path):
    async def check():
        fleet, victim = place.fleet, place.member(1)
        parameters = Parameters(place)
        rollouts = Rollouts(place)
        broadcast = Broadcast(parameters, rollouts, timeout_s=BROADCAST_TIMEOUT_S)
        folder = CountingFolder(parameters, [tmp_path])
        weight_sync = WeightSync(WeightSyncSection(), parameters, rollouts, broadcast, folder)
        weight_sync.version = place.version

        def versions():
            return {member.version for member in fleet.pool.servers.values()}

        async def sync():
            place.version += 1
            assert await asyncio.to_thread(weight_sync.sync, place.version) == place.version
            await asyncio.to_thread(weight_sync.finish)

        def kill(number):
            if number == 5:
                parameters.on_tensor = None
                time.sleep(0.5)  # by now the servers have stopped and wait for what comes
                place.signal(1, signal.SIGKILL)

        async with load(fleet) as requests:
            await requests.more()
            await sync()
            assert folder.count == 0, "the first broadcast needs no folder"
            assert versions() == {place.version}
            await requests.more()
            parameters.on_tensor = kill
            await sync()
            other = place.member(0)
            await wait_until(lambda: str(other.state) == "ready", "the other serves again, without a restart")
            assert other.version == place.version
            await requests.more()
            written = folder.count
            for _ in range(3):  # a trainer syncs again and again, and by broadcast to whom it can
                await sync()
            await wait_until(lambda: str(victim.state) in ("syncing", "ready"), "it is up again")
            for _ in range(20):
                await sync()
                if str(victim.state) == "ready":
                    break
                await asyncio.sleep(1)
            await wait_until(lambda: str(victim.state) == "ready", "it caught up")
            assert victim.version == place.version
            assert folder.count > written, "it caught up from a folder, written for it"
            await requests.more()
            await sync()
            written = folder.count
            await sync()
            assert folder.count == written
            assert versions() == {place.version}, "both are in the group"
            await requests.more()
        requests.check(place.log_files)

    place.run(check())


def test_stopped_for_a_while(place, load, wait_until):
    """SIGSTOP: nothing breaks off, there is only silence. An update comes meanwhile, before anybody has noticed."""

    async def check():
        fleet, member = place.fleet, place.member(0)
        async with load(fleet) as requests:
            await requests.more()
            place.signal(0, signal.SIGSTOP)
            try:
                await fleet.update_weights(place.next_update())
                assert str(member.state) in ("lost", "starting"), "an update waits for a server that is silent"
                await requests.more()
            finally:
                place.signal(0, signal.SIGCONT)
            await wait_until(lambda: str(member.state) == "ready", "it is back")
            assert member.version == place.version
            await requests.more()
            place.signal(0, signal.SIGSTOP)  # and now without an update
            try:
                await wait_until(lambda: str(member.state) in ("lost", "starting"), "silence is noticed")
                await requests.more()
                await fleet.update_weights(place.next_update())
                await requests.more()
            finally:
                place.signal(0, signal.SIGCONT)
            await wait_until(lambda: str(member.state) == "ready", "it is back")
            assert place.transitions(member.name)[-1]["version"] == place.version
            await requests.more()
        requests.check(place.log_files)

    place.run(check())


@asynccontextmanager
async def fleet_of(place, addresses, folder, model=None, **changes):
    """A second fleet, on servers that run already: those of the first one, which has nothing to do now."""
    changes = {"servers": 0, "addresses": addresses, "silence_timeout_s": 10.0, **changes}
    settings = SGLangConfig(**{**place.settings.model_dump(exclude={"api_key"}), **changes})
    fleet = ServerFleet(SGLangAdapter(settings), folder / "logs")
    try:
        await fleet.start(ModelReference(str(model or place.models[0]), "float32"))
        yield fleet
    finally:
        await fleet.close()


def addresses_of(place):
    return [place.member(number).connection.address for number in (0, 1)]


def state_of(fleet, address):
    return str(fleet.pool.servers[address.split("//")[1]].state)


def test_a_proxy_that_spoils_answers(place, load, proxied, wait_until, tmp_path):
    async def check():
        spoilt, plain = addresses_of(place)
        async with proxied(spoilt) as (address, proxy), fleet_of(place, [address, plain], tmp_path) as fleet:
            await wait_until(lambda: state_of(fleet, address) == state_of(fleet, plain) == "ready", "both are ready")
            async with load(fleet) as requests:
                for version, mode in enumerate(("garbage", "other form", "error", "cut", "slow"), 1):
                    await wait_until(lambda: state_of(fleet, address) == "ready", f"it is ready before {mode}")
                    before = len(proxy.spoilt)
                    proxy.mode = mode
                    await wait_until(lambda b=before: len(proxy.spoilt) > b + 3, f"some were spoilt by {mode}")
                    await fleet.update_weights(WeightUpdate(version, place.models[version]))
                    await requests.more()
                    proxy.mode = ""
                await wait_until(lambda: state_of(fleet, address) == "ready", "it is ready at the end")
                await requests.more()
            requests.check(place.log_files)
            await wait_until(lambda: state_of(fleet, address) == "ready", "it is ready to refuse")
            refused = len(proxy.spoilt)
            proxy.mode = "refuse"
            one = SamplingParameters(max_new_tokens=2)
            asked = [fleet.generate(GenerationRequest(f"refused-{n}", [5], one, 0)) for n in range(8)]
            found = await asyncio.gather(*asked, return_exceptions=True)
            told = [str(error) for error in found if isinstance(error, ValueError)]
            assert "/generate was refused (400): no such thing" in told[0]
            assert len(proxy.spoilt) == refused + len(told), "what is refused is not asked for again"

    place.run(check())


def test_servers_join_and_leave(place, load, wait_until, tmp_path):
    async def check():
        first, second = addresses_of(place)
        joins, leaves = ServerJoins("late", second), ServerLeaves("late", second)
        continued = rounds = 0
        async with (
            fleet_of(place, [first], tmp_path, drain_timeout_s=0) as fleet,
            load(fleet) as requests,
        ):
            await requests.more()
            await fleet.update_weights(WeightUpdate(1, place.models[1]))
            while not continued or rounds < 2:  # it comes back under its name
                await fleet.answer(joins)
                late = fleet.pool.servers["late"]
                await wait_until(lambda late=late: str(late.state) == "ready", "it joined")
                assert late.version == 1
                await requests.more()
                fleet.pop_metrics()
                await wait_until(lambda late=late: late.requests, "it is given requests")
                await asyncio.sleep(0.3)  # mostly some are half done by now; if not, the next round may be luckier
                await fleet.answer(leaves)
                await wait_until(lambda late=late: str(late.state) == "gone", "it is gone")
                assert late.requests == 0
                await requests.more(24)
                # What was not over after drain_timeout_s went on elsewhere.
                continued += fleet.pop_metrics().get("servers/continued", 0)
                rounds += 1
        requests.check(place.log_files)

    place.run(check())


def test_servers_that_the_run_cannot_use(place, load, proxied, wait_until, recorded_server, tmp_path):
    async def check():
        good, spare = addresses_of(place)
        other_model = make_model(tmp_path / "other")
        config = json.loads((other_model / "config.json").read_text())
        (other_model / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
        async with (
            recorded_server({"/server_info": {"version": "none"}}) as (something, _),
            proxied(spare) as (other, wrong_model),
            proxied(spare) as (broken, cannot_serve),
        ):
            wrong_model.info = {"model_path": str(other_model), "context_length": 64}
            cannot_serve.mode, cannot_serve.spoils_first = "error", True
            names = [something, other, broken]
            async with fleet_of(place, [*names, good], tmp_path) as fleet, load(fleet) as requests:
                await wait_until(lambda: all(state_of(fleet, n) == "refused" for n in names), "three are refused")
                reasons = fleet.pool.explain()
                print(reasons)
                assert "serves another model" in reasons
                assert "hidden_size 128 instead of 64" in reasons
                assert "is healthy but cannot serve this model: /generate failed (500): it burns" in reasons
                assert "answers, but not as an SGLang server does" in reasons
                await requests.more()
            requests.check(place.log_files)
            folder = tmp_path / "alone"
            folder.mkdir()
            with pytest.raises(RunError, match="of 1 servers are ready") as caught:
                async with fleet_of(place, names, folder):
                    pass
            for words in ("serves another model", "cannot serve this model"):
                assert words in str(caught.value)

    place.run(check())


@pytest.mark.parametrize("mode", ["keep_cache", "recompute"])
def test_a_conversation_finds_its_prefix_behind_an_update(place, wait_until, tmp_path, mode):
    """By what the server says of tokens that it found in its cache."""

    async def check():
        address = addresses_of(place)[0]
        async with fleet_of(place, [address], tmp_path, update_mode=mode) as fleet:
            numbers = itertools.count()

            async def turn(conversation, prompt):
                name = f"turn-{mode}-{next(numbers)}"
                sampling = SamplingParameters(max_new_tokens=8)
                found = await fleet.generate(GenerationRequest(name, prompt, sampling, 0, "g", conversation))

                def told():
                    mine = [event for event in place.events() if event.get("rid") == f"{name}.1"]
                    return [event["out"]["meta_info"] for event in mine if "out" in event]

                await wait_until(told, f"the server's line about {name}")
                return prompt + found.output_ids + [9, 10, 11], told()[0]["cached_tokens"]

            prompt = [5 + (7 * place) % 50 for place in range(200)]
            first, cached = await turn("first", prompt)
            assert cached == 0
            await fleet.update_weights(WeightUpdate(1, place.models[1]))
            first, cached = await turn("first", first)
            assert (cached >= len(prompt)) == (mode == "keep_cache"), cached
            if mode == "recompute":
                assert cached == 0
            second, cached = await turn("second", prompt[::-1])
            assert cached == 0
            second, cached = await turn("second", second)
            assert cached >= len(prompt), "turns under the same weights share their prefix in either mode"
            _, cached = await turn("third", prompt)
            assert cached <= (0 if mode == "keep_cache" else len(prompt)), "a new conversation meets no older keys"
            _, cached = await turn("first", first)
            assert cached >= len(prompt), "it goes on where it was"

    place.run(check())
