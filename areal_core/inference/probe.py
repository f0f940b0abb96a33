"""Short requests that check whether a server answers as it should."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from areal_core.data import SampledTokens, TokenIds
from areal_core.inference.adapter import PartialGeneration
from areal_core.inference.errors import known_form
from areal_core.interfaces.inference import SamplingParameters, ServerLostError

if TYPE_CHECKING:
    from areal_core.inference.adapter import Chunk
    from areal_core.inference.server import InferenceServer


async def ask(server: InferenceServer, purpose: str) -> list[Chunk]:
    """Request two tokens of a server, and return its answer.

    Args:
        server: the server.
        purpose: begins the request's name, which servers write into their logs.
    """
    partial = PartialGeneration(
        f"{purpose}-{server.name}-{secrets.token_hex(4)}",
        TokenIds([1]),
        SamplingParameters(max_new_tokens=2),
        seed=1,
        cache_salt=f"first-{server.version}",
        adapter=server.adapter.name_of(server.connection),
    )
    with known_form():
        return [chunk async for chunk in server.adapter.generate(server.connection, partial)]


async def check_answer(server: InferenceServer, purpose: str, vocabulary: int) -> bool:
    """Check what a server answers to a request of `ask`.

    Args:
        server: the server.
        purpose: see `ask`.
        vocabulary: number of the model's token ids.

    Returns:
        Whether the answer is complete; False if an update or another client ended the request.

    Raises:
        ServerLostError: the answer is empty, has tokens that the model lacks, or labels of other weights.
    """
    version_before = server.version
    chunks = await ask(server, purpose)
    expected = {server.label(version_before), server.label(server.version)}
    sampled = SampledTokens()
    with known_form():
        for chunk in chunks:
            sampled.extend(chunk.output_ids, chunk.logprobs)
    labels = {span[0] for chunk in chunks for span in chunk.spans or ()}
    if chunks and chunks[-1].finish == "abort":
        return False
    if fault := sampled.fault(vocabulary) or ("" if len(sampled) else "nothing"):
        raise ServerLostError(f"gives {fault}")
    if labels - expected:
        message = f"labels its weights {', '.join(labels)} instead of {server.label(server.version)}"
        raise ServerLostError(f"{message}: another program may have changed them")
    return True
