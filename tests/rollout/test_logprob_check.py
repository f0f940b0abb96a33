"""The requests that verify weights have tokens of the model, however few it has."""

from __future__ import annotations

import asyncio

import pytest

from areal_core.rollout.logprob_check import ANSWERS, check_answers
from areal_core.servers import SamplingParameters
from areal_testing.fakes import FakeEngine


@pytest.mark.parametrize("vocabulary", [2, 15, 151_936, None])
def test_a_small_vocabulary_is_verified_too(vocabulary: int | None) -> None:
    engine = FakeEngine()
    asyncio.run(check_answers(engine, SamplingParameters(max_new_tokens=8), 0, vocabulary))
    assert len(engine.requests) == ANSWERS
    tokens = {token for request in engine.requests for token in request.input_ids}
    assert max(tokens) < (vocabulary or 51)
    assert min(tokens) >= 1


def test_what_the_trainer_cannot_compute_is_left_out() -> None:
    """Of a distribution that is cut off, servers tell the log-probabilities of what is left."""
    engine, sampling = FakeEngine(), SamplingParameters(0.7, 64, 3, (2,), top_p=0.5, top_k=3, min_p=0.1, stop=("x",))
    asyncio.run(check_answers(engine, sampling, 0))
    assert {request.sampling for request in engine.requests} == {SamplingParameters(0.7, 32)}
