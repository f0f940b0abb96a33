"""A request on its way through the fleet: what it has so far, and what is still to be asked for.

A request may be worked on by several servers, one after another: a weight update or a server's death ends a piece, and
the next piece goes on behind the tokens that are kept. Each token keeps the version that sampled it.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.data.trajectory import FinishReason
from areal_core.interfaces.inference import Generation
from areal_servers.interface import Piece, ServerLostError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.interfaces.inference import GenerationRequest
    from areal_servers.interface import Chunk


class Answer:
    """What has been generated for a request.

    Attributes:
        pieces: how often something was asked for.
        output_ids, logprobs, versions: of the tokens that are kept, equally long.
        finish: why it ended, None while it has not.
    """

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.pieces = 0
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.finish: FinishReason | None = None
        self._cache_key: str | None = None

    @property
    def is_resumable(self) -> bool:
        """Whether a server that knows only the tokens can go on: stop texts and penalties look at what is its own."""
        sampling = self.request.sampling
        neutral = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (
            1.0,
            0.0,
            0.0,
        )
        return neutral and not sampling.stop

    def next_piece(self, version: int, *, keeps_cache: bool) -> Piece:
        """What is still missing, as a question of its own.

        Args:
            version: of the weights of the server that is asked.
            keeps_cache: whether keys and values of older weights may be used for tokens that they belong to.
        """
        if self._cache_key is None or not keeps_cache:
            self._cache_key = str(version)
        if not self.is_resumable:
            self.output_ids, self.logprobs, self.versions = [], [], []
        self.pieces += 1
        done, sampling = len(self.output_ids), self.request.sampling
        if done:
            sampling = replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - done,
                min_new_tokens=max(0, sampling.min_new_tokens - done),
            )
        name = f"{self.request.request_id}.{self.pieces}"
        # Random numbers of the tokens before must not come again.
        seed = self.request.seed if not done else _later_seed(self.request.seed, done)
        return Piece(name, self.request.input_ids + self.output_ids, sampling, seed, self._cache_key)

    def keep(self, tokens: PieceTokens, count: int, versions: Sequence[int]) -> None:
        """Take over the first tokens of a piece."""
        self.output_ids += tokens.output_ids[:count]
        self.logprobs += tokens.logprobs[:count]
        self.versions += versions[:count]
        if tokens.finish == "stop":
            self.finish = FinishReason.STOP
        elif tokens.finish == "length" or len(self.output_ids) >= self.request.sampling.max_new_tokens:
            self.finish = FinishReason.LENGTH

    def generation(self) -> Generation:
        """The complete answer."""
        assert self.finish is not None
        return Generation(self.output_ids, self.logprobs, self.versions, self.finish)


class PieceTokens:
    """The tokens of one piece as they arrive.

    Args:
        version: of the server's weights when the piece was sent.

    Attributes:
        certain: how many tokens are surely of `version`, because they came before any update began.
    """

    def __init__(self, version: int) -> None:
        self.version = version
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.certain = 0
        self.finish: str | None = None
        self._spans: Sequence[tuple[str, int, int]] | None = None

    def add(self, chunk: Chunk, *, is_certain: bool) -> None:
        """Tokens have arrived."""
        if len(chunk.output_ids) != len(chunk.logprobs):
            raise ServerLostError(f"sent {len(chunk.output_ids)} tokens with {len(chunk.logprobs)} log-probabilities")
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        if is_certain:
            self.certain = len(self.output_ids)
        self.finish = chunk.finish
        self._spans = chunk.spans

    def without_end(self) -> PieceTokens:
        """The same tokens, as if the piece were not over: what ended it may be among the uncertain ones."""
        if self.certain < len(self.output_ids):
            self.finish = None
        return self

    def versions(self, *, needs_spans: bool) -> list[int]:
        """[T] the version of each token.

        Raises:
            ServerLostError: the server's labels do not cover the tokens, or are none of this run's.
        """
        if self._spans is None:
            if needs_spans and self.output_ids and self.certain < len(self.output_ids):
                raise ServerLostError("sent no labels for tokens that an update may have met")
            return [self.version] * len(self.output_ids)
        versions: list[int] = []
        for label, start, end in self._spans:
            if not label.isdecimal() or start != len(versions):
                raise ServerLostError(f"labels its tokens '{label}' from {start}; somebody else changed its weights")
            versions += [int(label)] * (end - start)
        if len(versions) < len(self.output_ids):
            raise ServerLostError(f"labels {len(versions)} of {len(self.output_ids)} tokens")
        return versions[: len(self.output_ids)]


def _later_seed(seed: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
