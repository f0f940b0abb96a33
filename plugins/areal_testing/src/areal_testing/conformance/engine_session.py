"""What the suites of inference engines share: a started engine, requests, and waits that end."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.servers import GenerationRequest, SamplingParameters
from areal_testing.conformance.models import next_token_logprobs

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence
    from pathlib import Path

    from areal_core.data import Generation
    from areal_core.servers import InferenceEngine, UpdateMode

PROMPTS = ([5, 17, 33, 8], [5, 17, 33, 8, 40, 41, 42, 43, 44], [60], [12, 7] * 11)
"""Of unequal lengths; the first two share a prefix."""


class EngineSession:
    """The base of the suites of inference engines; the author overrides `make_engine`.

    Attributes:
        dtype: in which the engine is asked to compute.
        tolerance: of log-probabilities, against float64 log-softmax of transformers' float32 logits.
        patience_s: a wait that takes longer has failed.
        tokens_in_flight: long enough that several weight updates fall into the generation of so many tokens.
    """

    dtype = "float32"
    tolerance = 1e-4
    patience_s = 240.0
    tokens_in_flight = 256

    def make_engine(self, folder: Path, *, update_mode: UpdateMode, slots: int) -> InferenceEngine:
        """A new engine that has not been started.

        Args:
            folder: private and empty, for sockets, logs and the like.
            update_mode: one of those that the engine offers.
            slots: how many requests it generates from at once; more must wait.
        """
        raise NotImplementedError(f"{type(self).__name__} must say how its engine is made: override make_engine")

    def modes(self, folder: Path) -> list[UpdateMode]:
        """The update modes that the engine offers, in order of their names."""
        return sorted(self.make_engine(folder, update_mode="recompute", slots=8).capabilities.update_modes)

    @asynccontextmanager
    async def running(
        self, folder: Path, model: Path, *, update_mode: UpdateMode | None = None, slots: int = 8
    ) -> AsyncIterator[InferenceEngine]:
        """An engine with `model` as version 0, closed at the end."""
        private = folder / f"engine{sum(1 for _ in folder.glob('engine*'))}"
        private.mkdir()
        engine = self.make_engine(private, update_mode=update_mode or self.modes(private)[-1], slots=slots)
        try:
            await self.within(engine.start(ModelReference(str(model), self.dtype)), "start")  # type: ignore[arg-type]
            yield engine
        finally:
            await self.within(engine.close(), "close")

    async def within(self, work: Awaitable[Any], what: str, seconds: float | None = None) -> Any:
        """The result; a test fails, and does not hang, where it takes too long."""
        seconds = self.patience_s if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise
            raise AssertionError(f"{what} did not end within {seconds} s") from None

    async def answers(self, engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """All of them at once; each answer is checked for its form."""
        found = await self.within(asyncio.gather(*map(engine.generate, requests)), f"{len(requests)} requests")
        for generation in found:
            check_form(generation)
        return list(found)


_numbers = itertools.count()


def request(
    prompt: Sequence[int], seed: int = 0, *, most: int = 24, affinity: str = "", **sampling: Any
) -> GenerationRequest:
    """A request with an id that no other has."""
    settings = SamplingParameters(max_new_tokens=most, **sampling)
    return GenerationRequest(f"conformance-{next(_numbers)}", list(prompt), settings, seed, affinity)


def check_form(generation: Generation) -> None:
    """The three lists are equally long, and of plain numbers."""
    count = len(generation.output_ids)
    lengths = (count, len(generation.logprobs), len(generation.versions))
    assert len(set(lengths)) == 1, f"output_ids, logprobs and versions differ in length: {lengths}"
    assert all(type(token) is int for token in generation.output_ids), "output_ids holds something that is not an int"
    assert all(type(version) is int for version in generation.versions), "versions holds something that is not an int"


def check_logprobs(asked: GenerationRequest, generation: Generation, models: dict[int, Path], tolerance: float) -> None:
    """Every token's log-probability equals the reference under the weights of the version that it is labeled with."""
    whole = [*asked.input_ids, *generation.output_ids]
    tables = {
        version: next_token_logprobs(models[version], whole, asked.sampling.temperature)
        for version in set(generation.versions)
    }
    for place, (token, logprob, version) in enumerate(
        zip(generation.output_ids, generation.logprobs, generation.versions, strict=True)
    ):
        wanted = float(tables[version][len(asked.input_ids) - 1 + place, token])
        assert abs(logprob - wanted) <= tolerance, (
            f"token {place} of {len(whole)} (version {version}, temperature {asked.sampling.temperature}): the engine "
            f"says {logprob:.6f}, a plain forward pass {wanted:.6f}"
        )


async def answer_unless_stopped(engine: InferenceEngine, asked: GenerationRequest) -> Generation | None:
    """What an engine answers whose update failed; None where it has stopped serving, which is allowed too."""
    try:
        return await engine.generate(asked)
    except RunError:
        return None
