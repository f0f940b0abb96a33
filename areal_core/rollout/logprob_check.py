"""Whether an engine holds the weights that it should: answers whose log-probabilities the trainer computes too."""

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
    """Answers of every copy of the engine's weights to the same few requests, packed as the record of a group is.

    The column `copy` says by its number which copy a token is from.

    Args:
        engine: that generates.
        sampling: of the run; the answers are shorter.
        version: that every token must be of.
        vocabulary: how many token ids the model has, where that is known.

    Raises:
        RunError: nobody answers, or an answer is of another version.
    """
    count = min(TOKENS, sampling.max_new_tokens)
    # Nothing that looks at what was said before, so that a server that was interrupted can go on, and nothing that cuts
    # the distribution off, so that the trainer computes the same.
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
