"""Checks that an engine holds the right weights: the trainer computes the log-probabilities of its answers too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from areal_core.data import packing
from areal_core.data.tokens import TokenIds
from areal_core.data.trajectory import Trajectory
from areal_core.errors import RunError
from areal_core.interfaces.inference import GenerationRequest, SamplingParameters

if TYPE_CHECKING:
    from areal_core.interfaces.inference import InferenceEngine

ANSWERS, PROMPT_TOKENS, TOKENS = 4, 8, 32


async def check_answers(
    engine: InferenceEngine, sampling: SamplingParameters, version: int, vocabulary: int | None = None
) -> bytes:
    """Return the answers of every copy of the engine's weights to a few fixed prompts, packed as a group's record.

    The column `copy` has the number of the copy that sampled a token.

    Args:
        engine: generates.
        sampling: the run's parameters; the answers are shorter.
        version: weight version that every token must have.
        vocabulary: number of token ids that the model has; None if it is not known.

    Raises:
        RunError: no server answered, or an answer has another version.
    """
    count = min(TOKENS, sampling.max_new_tokens)
    # Without penalties, so that an interrupted request can continue on another server. Without top-p and the like, so
    # that the trainer computes the same distribution.
    sampling = SamplingParameters(sampling.temperature, count, greedy=sampling.greedy)
    trajectories = []
    tokens = min(50, (vocabulary or 51) - 1)
    for number in range(ANSWERS):
        prompt = [1 + (number * 7 + place) % tokens for place in range(PROMPT_TOKENS)]
        request = GenerationRequest(f"check-{version}-{number}", TokenIds(prompt), sampling, seed=number)
        for copy, answer in enumerate(await engine.generate_everywhere(request)):
            if set(answer.versions) - {version}:
                raise RunError(f"a server answers with weights of versions {set(answer.versions)} and not {version}")
            trajectory = Trajectory.from_generation(prompt, answer)
            trajectory.tokens["copy"] = np.full(len(trajectory), copy)
            trajectories.append(trajectory)
    if not trajectories:
        raise RunError("no server answered the requests of the log-probability check")
    return packing.to_bytes(packing.pack(trajectories))
