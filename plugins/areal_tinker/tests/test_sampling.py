"""One set of weights at a time, in the order of arrival."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.data import FinishReason, Generation
from areal_core.errors import RunError
from areal_core.servers import InferenceCapabilities, InferenceEngine, SamplingParameters
from areal_tinker.sampling import Sampling

BASE = "base"
ONE = SamplingParameters(max_new_tokens=1)


class Engine(InferenceEngine):
    """Answers with the version that it has at the end of a request, when the test allows it."""

    capabilities = InferenceCapabilities(frozenset({"recompute"}))

    def __init__(self) -> None:
        self.version, self.events, self.running = 0, [], 0
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.awake = asyncio.Event()
        self.awake.set()

    async def start(self, model):
        pass

    async def generate(self, request):
        self.running += 1
        await self.may_answer.wait()
        await self.awake.wait()
        self.running -= 1
        self.events.append(("answer", self.version))
        return Generation([7], [-1.0], [self.version], FinishReason.LENGTH)

    async def update_weights(self, update):
        await asyncio.sleep(0)
        self.events.append(((update.path / "model.safetensors").read_text(), update.version))
        self.version = update.version
        self.awake.set()

    async def sleep(self):
        self.awake.clear()

    def client(self, slots, model):
        raise NotImplementedError

    def acquire(self, request, holder):
        raise NotImplementedError

    def release(self, holder, *, has_failed=False):
        raise NotImplementedError


@pytest.fixture
def play(tmp_path):
    """Plays a scenario with an engine whose checkpoints are folders with a file."""
    for name in ("base", "a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)

    class NamedSampling(Sampling):
        async def generate(self, name, *arguments):
            return await super().generate(tmp_path / name, *arguments)

    def played(scenario):
        async def run():
            engine = Engine()
            await scenario(engine, NamedSampling(engine, tmp_path / "base", tmp_path / "loaded"))

        asyncio.run(run())

    return played


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


def test_requests_for_other_weights_wait_and_later_ones_behind_them(play):
    """All that wait for the same weights are answered together."""

    async def scenario(engine, sampling):
        engine.may_answer.clear()
        asked = [asyncio.ensure_future(sampling.generate(w, [1], ONE, [0])) for w in (BASE, BASE, "a", BASE, "a")]
        await settle()
        assert engine.running == 2, "the two of the base model at the head"
        assert engine.events == []
        engine.may_answer.set()
        await asyncio.gather(*asked)
        assert engine.events == [
            *[("answer", 0)] * 2, ("a", 1), *[("answer", 1)] * 2, ("base", 2), ("answer", 2),
        ]  # fmt: skip

    play(scenario)


def test_weights_that_cannot_be_loaded_fail_their_requests_alone(play):
    async def scenario(engine, sampling):
        results = await asyncio.gather(
            *(sampling.generate(weights, [1], ONE, [0]) for weights in (BASE, "broken", "a", "broken")),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [list, FileNotFoundError, list, FileNotFoundError]

    play(scenario)


def test_a_client_that_goes_away_leaves_its_place(play):
    async def scenario(engine, sampling):
        engine.may_answer.clear()
        asked = [asyncio.ensure_future(sampling.generate(weights, [1], ONE, [0])) for weights in (BASE, "a", BASE)]
        await settle()
        asked[1].cancel()
        await settle()
        engine.may_answer.set()
        await asyncio.gather(asked[0], asked[2])
        assert [name for name, _ in engine.events] == ["answer"] * 2, "nothing was loaded"
        running = asyncio.ensure_future(sampling.generate(BASE, [1], ONE, [0]))
        engine.may_answer.clear()
        await settle()
        running.cancel()
        await settle()
        engine.may_answer.set()
        await sampling.generate("a", [1], ONE, [0])

    play(scenario)


def test_an_engine_that_rests_continues_with_the_weights_of_its_requests(play):
    async def scenario(engine, sampling):
        await sampling.generate("a", [1], ONE, [0])
        engine.may_answer.clear()
        running = asyncio.ensure_future(sampling.generate("a", [1], ONE, [0]))
        await settle()
        await sampling.rest()
        engine.may_answer.set()
        later = asyncio.ensure_future(sampling.generate("b", [1], ONE, [0]))
        await settle()
        assert not running.done()
        await sampling.wake()
        await asyncio.gather(running, later)
        await sampling.rest()
        await sampling.wake()
        await sampling.generate("b", [1], ONE, [0])
        names = [name for name, _ in engine.events]
        assert names == ["a", "answer", "a", "answer", "b", "answer", "b", "answer"]

    play(scenario)


def test_an_answer_of_other_weights_is_an_error(play):
    async def scenario(engine, sampling):
        engine.version = 5
        with pytest.raises(RunError, match="other weights than those of the request"):
            await sampling.generate(BASE, [1], ONE, [0])

    play(scenario)
