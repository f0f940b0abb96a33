"""A request on its way through the fleet: what it has so far, and what is still to be asked for.

A request may be worked on by several servers, one after another: a weight update or a server's death ends a piece, and
the next piece goes on behind the tokens that are kept. Each token keeps the version that sampled it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import replace
from typing import TYPE_CHECKING

from areal_core.data import Generation
from areal_core.data.trajectory import FinishReason, joined_columns, sampling_fault
from areal_servers.errors import ServerLostError
from areal_servers.interface import Piece

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from areal_core.interfaces import GenerationRequest, SamplingParameters, UpdateMode
    from areal_servers.interface import Chunk


REMEMBERED = 1 << 16
"""Conversations whose key is remembered."""


class Conversations:
    """The cache key of each conversation; servers share a prefix only between requests of one key.

    In `keep_cache` a conversation has the key of the version under which it began, over every update, so that its
    later turns find their prefix; one that begins now has the key of the current version, and so meets no older keys
    and values. In `recompute` the key is always that of the current version.

    Args:
        mode: of weight updates.
        remembered: conversations; the one that was silent longest is forgotten first, and begins anew when it goes on.
    """

    def __init__(self, mode: UpdateMode, remembered: int = REMEMBERED) -> None:
        self._keeps_cache = mode == "keep_cache"
        self._remembered = remembered
        self._keys: OrderedDict[str, str] = OrderedDict()

    def key(self, conversation: str, version: int) -> str:
        """The key of the next request of a conversation.

        Args:
            conversation: its name.
            version: of the weights under which the request begins.
        """
        if not self._keeps_cache:
            return str(version)
        key = self._keys.setdefault(conversation, str(version))
        self._keys.move_to_end(conversation)
        if len(self._keys) > self._remembered:
            self._keys.popitem(last=False)
        return key


class Answer:
    """What has been generated for a request.

    Args:
        request: whose answer it is; without a conversation it is one by itself.
        conversations: know the cache key.

    Attributes:
        pieces: how often something was asked for.
        output_ids, logprobs, versions: of the tokens that are kept, equally long.
        columns: further ones; see `Generation`.
        finish: why it ended, None while it has not.
    """

    def __init__(self, request: GenerationRequest, conversations: Conversations) -> None:
        self.request = request
        self.pieces = 0
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.columns: dict[str, torch.Tensor] = {}
        self.finish: FinishReason | None = None
        self._conversations = conversations
        self._conversation = request.conversation or f"request {request.request_id}"

    def next_piece(self, version: int) -> Piece:
        """What is still missing, as a question of its own.

        Args:
            version: of the weights of the server that is asked.
        """
        if not is_resumable(self.request.sampling):
            self.output_ids, self.logprobs, self.versions, self.columns = [], [], [], {}
        self.pieces += 1
        done, sampling = len(self.output_ids), self.request.sampling
        if done:
            most, least = sampling.max_new_tokens - done, max(0, sampling.min_new_tokens - done)
            sampling = replace(sampling, max_new_tokens=most, min_new_tokens=least)
        name = f"{self.request.request_id}.{self.pieces}"
        # Random numbers of the tokens before must not come again.
        seed = self.request.seed if not done else _later_seed(self.request.seed, done)
        key = self._conversations.key(self._conversation, version)
        return Piece(name, self.request.input_ids + self.output_ids, sampling, seed, key, self.request.images)

    def keep(self, tokens: PieceTokens, count: int, versions: Sequence[int]) -> None:
        """Take over the first tokens of a piece."""
        self.output_ids += tokens.output_ids[:count]
        self.logprobs += tokens.logprobs[:count]
        self.versions += versions[:count]
        self.columns = joined_columns(self.columns, tokens.columns, len(self.request.input_ids) + len(self.output_ids))
        if tokens.finish == "stop":
            self.finish = FinishReason.STOP
        elif tokens.finish == "length" or len(self.output_ids) >= self.request.sampling.max_new_tokens:
            self.finish = FinishReason.LENGTH

    def generation(self) -> Generation:
        """The complete answer."""
        assert self.finish is not None
        return Generation(self.output_ids, self.logprobs, self.versions, self.finish, self.columns)


class PieceTokens:
    """The tokens of one piece as they arrive.

    Args:
        version: of the server's weights when the piece was sent.
        most: tokens that were asked for.
        mark: of the run, in front of the versions in the server's labels.

    Attributes:
        certain: how many tokens are surely of `version`, because they came before any update began.
    """

    def __init__(self, version: int, most: int, mark: str = "") -> None:
        self.version = version
        self._most = most
        self._mark = mark
        self.output_ids: list[int] = []
        self.logprobs: list[float] = []
        self.certain = 0
        self.finish: str | None = None
        self.columns: Mapping[str, torch.Tensor] = {}
        self._spans: Sequence[tuple[str, int, int]] | None = None

    def add(self, chunk: Chunk, *, is_certain: bool) -> None:
        """Tokens have arrived."""
        if fault := sampling_fault(chunk.output_ids, chunk.logprobs, self._most - len(self.output_ids)):
            raise ServerLostError(f"sent {fault}")
        self.output_ids += chunk.output_ids
        self.logprobs += chunk.logprobs
        if is_certain:
            self.certain = len(self.output_ids)
        self.finish, self.columns, self._spans = chunk.finish, chunk.columns, chunk.spans

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
            number = label.removeprefix(self._mark)
            if f"{self._mark}{number}" != label or not number.isdecimal() or start != len(versions):
                raise ServerLostError(f"labels its tokens '{label}' from {start}; somebody else changed its weights")
            versions += [int(number)] * (end - start)
        if len(versions) < len(self.output_ids):
            raise ServerLostError(f"labels {len(versions)} of {len(self.output_ids)} tokens")
        return versions[: len(self.output_ids)]


def is_resumable(sampling: SamplingParameters) -> bool:
    """Whether a server that knows only the tokens can go on: stop texts and penalties look at what is its own."""
    neutral = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "stop": ()}
    return all(getattr(sampling, name) == value for name, value in neutral.items())


def _later_seed(seed: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
