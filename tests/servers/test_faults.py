"""True servers that are killed, stopped, cut off, slow or wrong, under load: nothing is lost, doubled, mislabelled."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from contextlib import asynccontextmanager, suppress

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_core.errors import RunError
from areal_core.interfaces import GenerationRequest, ModelReference, SamplingParameters, WeightUpdate
from areal_core.testing.conformance.models import make_model
from areal_core.training.broadcast import Broadcaster
from areal_servers.registry import Registry
from areal_sglang.config import SGLangConfig
from areal_sglang.engine import SGLangEngine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HEALTH_TIMEOUT_S = 2.0
BROADCAST_TIMEOUT_S = 20.0


def test_killed_while_it_generates(place, load, wait_until):
    async def check():
        fleet, member = place.fleet, place.member(0)
        async with load(fleet) as requests:
            await requests.more()
            fleet.take_metrics()
            place.signal(0, signal.SIGKILL)
            await wait_until(lambda: str(member.state) == "lost", "the loss is noticed", 5)
            began = time.monotonic()
            await fleet.update_weights(place.next_update())
            assert time.monotonic() - began < 10, "an update waits for a server that is dead"
            await requests.more()
            await wait_until(lambda: str(member.state) == "ready", "it was started again", 120)
            assert place.transitions(member.name)[-1]["version"] == place.version
            await wait_until(lambda: member.requests, "it is given requests again")
            await requests.more()
        requests.check(place.log_files)
        metrics = fleet.take_metrics()
        assert metrics["servers/continued"] >= 1
        assert metrics["servers/failed"] >= 1

    place.run(check())


class Trainer:
    """The trainer's end of a broadcast, and what lies between it and the fleet in a run."""

    def __init__(self, place):
        self.place = place
        self.needs_folder = False
        self.on_tensor = None
        self.folders_written = []
        self._publication = None
        self._weights = {}

    def _ask(self, work):
        return asyncio.run_coroutine_threadsafe(work, self.place.loop)

    async def _update(self, update):
        await self.place.fleet.update_weights(update)
        return self.place.fleet.needs_folder()

    def _finish(self):
        publication, self._publication = self._publication, None
        if publication is not None:
            self.needs_folder = publication.result(120)

    # The train engine.

    def named_full_parameters(self):
        self._weights = load_file(self.place.models[self.place.version] / "model.safetensors")
        for number, (name, value) in enumerate(self._weights.items()):
            if self.on_tensor is not None:
                self.on_tensor(number)
            yield name, value

    # The folders.

    def write(self, version):
        self.folders_written.append(version)
        return self.place.models[version]

    def publish(self, version, trained, folder=None):
        self._finish()
        self._publication = self._ask(self._update(WeightUpdate(version, self.write(version))))
        self._finish()

    # The target.

    def form_group(self, address, port, backend, standing):
        return self._ask(self.place.fleet.form_group(address, port, backend, standing)).result(60)

    def begin_broadcast(self, version, trained, tensors):
        self._publication = self._ask(self._update(WeightUpdate(version, None, tuple(tensors))))

    def broadcast_failed(self):
        return self._publication.done()

    def end_broadcast(self):
        self._finish()

    def drop_broadcast(self):
        with suppress(RunError):
            self._finish()

    def offer_folder(self, version, folder):
        update = WeightUpdate(version, folder)
        self.place.loop.call_soon_threadsafe(self.place.fleet.offer_folder, update)


@pytest.fixture(scope="module")
def alone():
    """A process group of this process, which the trainer's own ranks talk in."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.long
def test_killed_in_the_middle_of_a_broadcast(place, load, wait_until, alone):
    async def check():
        fleet, victim = place.fleet, place.member(1)
        trainer = Trainer(place)
        sender = Broadcaster(
            trainer, trainer, trainer, torch.float32, address="127.0.0.1", timeout_s=BROADCAST_TIMEOUT_S
        )

        async def publish():
            place.version += 1
            began = time.monotonic()
            await asyncio.to_thread(sender.publish, place.version, place.version)
            return time.monotonic() - began

        def kill(number):
            if number == 5:
                time.sleep(0.5)  # by now the servers have stopped and wait for what comes
                place.signal(1, signal.SIGKILL)

        async with load(fleet) as requests:
            await requests.more()
            await publish()
            assert trainer.folders_written == [], "the first broadcast needs no folder"
            assert {member.version for member in fleet._members.values()} == {place.version}
            await requests.more()
            trainer.on_tensor = kill
            seconds = await publish()
            trainer.on_tensor = None
            print(f"broadcast under which a server was killed: {seconds:.1f} s")
            assert seconds < BROADCAST_TIMEOUT_S + 5
            other = place.member(0)
            await wait_until(lambda: str(other.state) == "ready", "the other serves again, without a restart", 10)
            assert other.version == place.version
            await requests.more()
            written = len(trainer.folders_written)
            for _ in range(25):  # a trainer publishes again and again, and by broadcast to whom it can
                await publish()
                if str(victim.state) == "ready":
                    break
                await asyncio.sleep(4)
            await wait_until(lambda: str(victim.state) == "ready", "it caught up", 90)
            assert victim.version == place.version
            assert len(trainer.folders_written) > written, "it caught up from a folder, written for it"
            await requests.more()
            await publish()
            written = len(trainer.folders_written)
            assert await publish() < 2 * HEALTH_TIMEOUT_S
            assert len(trainer.folders_written) == written
            assert {member.version for member in fleet._members.values()} == {place.version}, "both are in the group"
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
                began = time.monotonic()
                await fleet.update_weights(place.next_update())
                seconds = time.monotonic() - began
                print(f"update with a stopped server: {seconds:.1f} s")
                assert seconds < 2 * HEALTH_TIMEOUT_S + 4, "an update waits for a server that is silent"
                assert str(member.state) in ("lost", "starting")
                await requests.more()
            finally:
                place.signal(0, signal.SIGCONT)
            await wait_until(lambda: str(member.state) == "ready", "it is back", 40)
            assert member.version == place.version
            await requests.more()
            place.signal(0, signal.SIGSTOP)  # and now without an update
            try:
                await wait_until(lambda: str(member.state) in ("lost", "starting"), "silence is noticed", 15)
                await requests.more()
                await fleet.update_weights(place.next_update())
                await requests.more()
            finally:
                place.signal(0, signal.SIGCONT)
            await wait_until(lambda: str(member.state) == "ready", "it is back", 40)
            assert place.transitions(member.name)[-1]["version"] == place.version
            await requests.more()
        requests.check(place.log_files)

    place.run(check())


@asynccontextmanager
async def fleet_of(place, addresses, folder, model=None, **changes):
    """A second fleet, on servers that run already: those of the first one, which has nothing to do now."""
    changes = {"servers": 0, "addresses": addresses, "min_servers": 1, "silence_timeout_s": 1.5, **changes}
    fleet = SGLangEngine(
        SGLangConfig(**{**place.settings.model_dump(exclude={"api_key"}), **changes}), folder / "logs", folder
    )
    try:
        await fleet.start(ModelReference(str(model or place.models[0]), "float32"))
        yield fleet
    finally:
        await fleet.close()


def addresses_of(place):
    return [place.member(number).connection.address for number in (0, 1)]


def state_of(fleet, address):
    return str(fleet._members[address.split("//")[1]].state)


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
        registry = Registry(tmp_path)
        async with (
            fleet_of(place, [first], tmp_path, drain_timeout_s=0) as fleet,
            load(fleet) as requests,
        ):
            await requests.more()
            await fleet.update_weights(WeightUpdate(1, place.models[1]))
            registry.announce("late", second)
            await wait_until(lambda: registry.states().get("late") == "ready", "it joined")
            late = fleet._members["late"]
            assert late.version == 1
            await wait_until(lambda: late.requests, "it is given requests")
            await requests.more()
            fleet.take_metrics()
            await wait_until(lambda: late.requests, "it works while it is withdrawn")
            registry.withdraw("late")
            await wait_until(lambda: registry.states()["late"] == "gone", "it is gone", 10)
            assert late.requests == 0
            await requests.more(24)
            assert fleet.take_metrics()["servers/continued"] >= 1, "what was not over after drain_timeout_s went on"
            registry.announce("late", second)
            await wait_until(lambda: registry.states()["late"] == "ready", "it came back under its name")
            await requests.more()
        requests.check(place.log_files)

    place.run(check())


def test_servers_that_the_run_cannot_use(place, load, proxied, wait_until, replay, tmp_path):
    async def check():
        good, spare = addresses_of(place)
        other_model = make_model(tmp_path / "other")
        config = json.loads((other_model / "config.json").read_text())
        (other_model / "config.json").write_text(json.dumps({**config, "hidden_size": 128}))
        async with (
            replay({"/health": (404, {"detail": "no"})}) as (something, _),
            proxied(spare) as (other, wrong_model),
            proxied(spare) as (broken, cannot_serve),
        ):
            wrong_model.info = {"model_path": str(other_model), "context_length": 64}
            cannot_serve.mode, cannot_serve.spoils_first = "error", True
            names = [something, other, broken]
            async with fleet_of(place, [*names, good], tmp_path) as fleet, load(fleet) as requests:
                await wait_until(lambda: all(state_of(fleet, n) == "refused" for n in names), "three are refused")
                reasons = fleet._reasons()
                print(reasons)
                assert "serves another model" in reasons
                assert "hidden_size 128 instead of 64" in reasons
                assert "is healthy but cannot serve this model: /generate failed (500): it burns" in reasons
                assert "answers something else than a server would" in reasons or "answers, but not as" in reasons
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
