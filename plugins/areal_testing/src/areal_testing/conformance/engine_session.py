"""The base of the suites of inference engines: a started engine, requests, and waits with a timeout."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import torch

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
"""Prompts of unequal lengths. The first two share a prefix."""


class EngineSession:
    """The base of the suites of inference engines. Override `make_engine`.

    Attributes:
        dtype: dtype in which the engine computes.
        tolerance: largest absolute difference of a log-probability from float64 log-softmax of transformers' float32
            logits.
        patience_s: seconds after which a wait fails the test.
        tokens_in_flight: output tokens of a long request. Several weight updates happen during its generation.
    """

    dtype = "float32"
    tolerance = 1e-4
    patience_s = 240.0
    tokens_in_flight = 256

    def make_engine(self, folder: Path, *, update_mode: UpdateMode, slots: int) -> InferenceEngine:
        """Return a new engine that has not been started.

        Args:
            folder: empty folder of this engine, for sockets, logs and similar files.
            update_mode: one of the engine's update modes.
            slots: number of requests that the engine generates concurrently. Further requests wait.
        """
        raise NotImplementedError(f"{type(self).__name__} must override make_engine and return its engine")

    def modes(self, folder: Path) -> list[UpdateMode]:
        """Return the engine's update modes, sorted."""
        return sorted(self.make_engine(folder, update_mode="recompute", slots=8).capabilities.update_modes)

    @asynccontextmanager
    async def running(
        self, folder: Path, model: Path, *, update_mode: UpdateMode | None = None, slots: int = 8
    ) -> AsyncIterator[InferenceEngine]:
        """Start an engine with `model` as version 0, and close it at the end of the block."""
        private = folder / f"engine{sum(1 for _ in folder.glob('engine*'))}"
        private.mkdir()
        engine = self.make_engine(private, update_mode=update_mode or self.modes(private)[-1], slots=slots)
        try:
            await self.within(engine.start(ModelReference(str(model), self.dtype)), "start")  # type: ignore[arg-type]
            yield engine
        finally:
            await self.within(engine.close(), "close")

    async def within(self, work: Awaitable[Any], description: str, seconds: float | None = None) -> Any:
        """Return the result of `work`. The test fails if it takes longer than `seconds`, `patience_s` by default."""
        seconds = self.patience_s if seconds is None else seconds
        try:
            async with asyncio.timeout(seconds) as timer:
                return await work
        except TimeoutError:
            if not timer.expired():
                raise
            raise AssertionError(f"{description} did not end within {seconds} s") from None

    async def answers(self, engine: InferenceEngine, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Send all requests concurrently and return the generations, whose form is checked."""
        generations = await self.within(asyncio.gather(*map(engine.generate, requests)), f"{len(requests)} requests")
        for generation in generations:
            check_form(generation)
        return list(generations)


_request_numbers = itertools.count()


def make_request(
    prompt: Sequence[int], seed: int = 0, *, most: int = 24, affinity: str = "", **sampling: Any
) -> GenerationRequest:
    """Return a request with a unique id and at most `most` new tokens."""
    settings = SamplingParameters(max_new_tokens=most, **sampling)
    return GenerationRequest(f"conformance-{next(_request_numbers)}", list(prompt), settings, seed, affinity)


def check_form(generation: Generation) -> None:
    """Assert that the three lists of a generation have one length and contain plain Python numbers."""
    count = len(generation.output_ids)
    lengths = (count, len(generation.logprobs), len(generation.versions))
    assert len(set(lengths)) == 1, f"output_ids, logprobs and versions differ in length: {lengths}"
    shapes = generation.top_ids.shape, generation.top_logprobs.shape
    assert shapes[0] == shapes[1], f"top_ids and top_logprobs have the shapes {shapes}"
    of_prompt = generation.prompt_logprobs
    assert of_prompt is None or all(type(value) is float for value in of_prompt), "prompt_logprobs is no list of floats"
    assert all(type(token) is int for token in generation.output_ids), "output_ids holds something that is not an int"
    assert all(type(version) is int for version in generation.versions), "versions holds something that is not an int"


def check_logprobs(
    request: GenerationRequest, generation: Generation, models: dict[int, Path], tolerance: float
) -> None:
    """Assert that each log-probability is that of a plain forward pass with the weights of the token's version.

    If the request has `top_logprobs`, those of the likeliest tokens are compared too. Tokens that are nearly as likely
    may replace each other.

    Args:
        request: the request, with its prompt and temperature.
        generation: the answer.
        models: folder of the model of each version.
        tolerance: largest absolute difference.
    """
    whole = [*request.input_ids, *generation.output_ids]
    tables = {
        version: next_token_logprobs(models[version], whole, request.sampling.temperature)
        for version in set(generation.versions)
    }
    for position, (token, logprob, version) in enumerate(
        zip(generation.output_ids, generation.logprobs, generation.versions, strict=True)
    ):
        expected = float(tables[version][len(request.input_ids) - 1 + position, token])
        assert abs(logprob - expected) <= tolerance, (
            f"token {position} of {len(whole)} (version {version}, temperature {request.sampling.temperature}): the "
            f"engine reports {logprob:.6f}, a plain forward pass {expected:.6f}"
        )
    count = request.sampling.top_logprobs
    shape = generation.top_ids.shape
    assert shape == (len(generation), count), (
        f"{count} likeliest tokens were requested for each of {len(generation)} tokens: top_ids has the shape {shape}"
    )
    for position, (ids, logprobs, version) in enumerate(
        zip(generation.top_ids.tolist(), generation.top_logprobs.tolist(), generation.versions, strict=True)
    ):
        table = tables[version][len(request.input_ids) - 1 + position]
        likeliest = table.topk(count).values.tolist()
        own = table[ids].tolist() if ids else []
        gaps = [abs(a - b) for values in (likeliest, own) for a, b in zip(logprobs, values, strict=True)]
        assert max(gaps, default=0) <= tolerance, (
            f"likeliest tokens of position {position} (version {version}): the engine reports {ids} with {logprobs}, a "
            f"plain forward pass {own} for these and {likeliest} for the likeliest"
        )
        assert len(set(ids)) == count, f"top_ids of position {position} repeat a token: {ids}"


def check_prompt_logprobs(request: GenerationRequest, generation: Generation, model: Path, tolerance: float) -> None:
    """Assert that `prompt_logprobs` are those of a plain forward pass at temperature 1; None if not requested.

    Args:
        request: the request.
        generation: the answer.
        model: folder of the model that sampled the first token.
        tolerance: largest absolute difference.
    """
    reported = generation.prompt_logprobs
    if not request.sampling.prompt_logprobs:
        assert reported is None, "an answer has prompt_logprobs that were not requested"
        return
    assert reported is not None, "an answer lacks the prompt_logprobs that were requested"
    wanted = torch.tensor(request.input_ids[1:], dtype=torch.int64)[:, None]
    expected = next_token_logprobs(model, request.input_ids, 1.0)[:-1].gather(1, wanted)[:, 0]
    assert len(reported) == len(expected), (
        f"a prompt of {len(request.input_ids)} tokens has {len(reported)} prompt_logprobs instead of {len(expected)}"
    )
    gaps = (torch.tensor(reported, dtype=torch.float64) - expected).abs()
    assert bool((gaps <= tolerance).all()), (
        f"prompt_logprobs of {len(request.input_ids)} tokens (temperature {request.sampling.temperature}) differ by "
        f"{float(gaps.max()):.6f} at token {int(gaps.argmax()) + 1} from a plain forward pass at temperature 1"
    )


async def answer_unless_stopped(engine: InferenceEngine, request: GenerationRequest) -> Generation | None:
    """Return an engine's answer after a failed update. None if the engine has stopped serving, which is allowed."""
    try:
        return await engine.generate(request)
    except RunError:
        return None
