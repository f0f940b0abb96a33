"""Whether an engine holds the weights that it should: answers whose log-probabilities the trainer computes too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.data.batch import PackedBatch
from areal_core.data.trajectory import Trajectory
from areal_core.errors import RunError
from areal_core.interfaces.inference import GenerationRequest

if TYPE_CHECKING:
    from areal_core.interfaces.inference import InferenceEngine, SamplingParameters

PROBES, PROMPT_TOKENS, TOKENS = 4, 8, 32


async def probe_weights(
    engine: InferenceEngine, sampling: SamplingParameters, version: int, vocabulary: int | None = None
) -> PackedBatch:
    """Answers of every copy of the engine's weights to the same few requests.

    Args:
        engine: that generates.
        sampling: of the run; the answers are shorter.
        version: that every token must be of.
        vocabulary: how many token ids the model has, where that is known.

    Raises:
        RunError: nobody answers, or an answer is of another version.
    """
    count = min(TOKENS, sampling.max_new_tokens)
    # With nothing that looks at what was said before, a server that was interrupted can go on.
    sampling = replace(sampling, max_new_tokens=count, min_new_tokens=0, stop=(), stop_token_ids=())
    sampling = replace(sampling, repetition_penalty=1.0, frequency_penalty=0.0, presence_penalty=0.0)
    trajectories = []
    tokens = min(50, (vocabulary or 51) - 1)
    for number in range(PROBES):
        prompt = [1 + (number * 7 + place) % tokens for place in range(PROMPT_TOKENS)]
        request = GenerationRequest(f"probe-{version}-{number}", prompt, sampling, seed=number)
        for answer in await engine.generate_everywhere(request):
            if set(answer.versions) - {version}:
                raise RunError(f"a server answers with weights of versions {set(answer.versions)} and not {version}")
            trajectories.append(Trajectory.from_generation(prompt, answer))
    if not trajectories:
        raise RunError("no server answers the requests that verify its weights")
    return PackedBatch.from_trajectories(trajectories)
