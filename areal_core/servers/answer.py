"""A request on its way through the fleet: what it has so far, and what is still to be asked for.

A request may be worked on by several servers, one after another: a weight update or a server's death ends a partial
generation, and the next one goes on behind the tokens that are kept. Each token keeps the version that sampled it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from areal_core.data import Generation, SampledTokens, TokenIds
from areal_core.data.trajectory import FinishReason, joined_columns
from areal_core.interfaces import ServerLostError
from areal_core.servers.interface import PartialGeneration

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from areal_core.data.trajectory import Values
    from areal_core.interfaces import GenerationRequest, Grant, SamplingParameters, UpdateMode
    from areal_core.servers.interface import Chunk


REMEMBERED = 1 << 16
"""Conversations whose key is remembered."""


class Conversations:
    """The cache salt of each conversation; servers share a prefix only between requests of one key.

    In `keep_cache` a conversation has the key of the version under which it began, over every update, so that its
    later turns find their prefix; one that begins now has the key of the current version, and so meets no older keys
    and values. In `recompute` the key is always that of the current version.

    Args:
        mode: of weight updates.
        remembered: conversations; the one that was silent longest is forgotten first, and begins anew when it goes on.
    """

    def __init__(self, mode: UpdateMode, remembered: int = REMEMBERED) -> None:
        self._keeps_cache = mode == "keep_cache"
        self._begun: Callable[[str], list[str]] = lru_cache(remembered)(lambda conversation: [])

    def key(self, conversation: str, version: int) -> str:
        """The key of the next request of a conversation, which begins under weights of a version."""
        if not self._keeps_cache:
            return str(version)
        if not (begun := self._begun(conversation)):
            begun.append(str(version))
        return begun[0]


class Answer:
    """What has been generated for a request.

    Args:
        request: whose answer it is; without a conversation it is one by itself.
        conversations: know the cache salt.
        asker: in front of the names of partial generations, which nobody else uses.

    Attributes:
        partials: how often something was asked for.
        sampled: the tokens that are kept.
        columns: further ones; see `Generation`.
        finish: why it ended, None while it has not.
    """

    def __init__(self, request: GenerationRequest, conversations: Conversations, asker: str = "") -> None:
        self.request = request
        self._asker = asker
        self._prompt = TokenIds.of(request.input_ids)
        self.partials = 0
        self.sampled = SampledTokens()
        self.columns: dict[str, Values] = {}
        self.finish: FinishReason | None = None
        self._conversations = conversations
        self._conversation = request.conversation or f"request {request.request_id}"

    def next_partial(self, grant: Grant) -> PartialGeneration:
        """What is still missing, as a question of its own to the server of a slot."""
        if not is_resumable(self.request.sampling):
            self.sampled, self.columns = SampledTokens(), {}
        self.partials += 1
        done, sampling = len(self.sampled), self.request.sampling
        if done:
            most, least = sampling.max_new_tokens - done, max(0, sampling.min_new_tokens - done)
            sampling = replace(sampling, max_new_tokens=most, min_new_tokens=least)
        name = f"{self._asker}{self.request.request_id}.{self.partials}"
        # Random numbers of the tokens before must not come again.
        seed = self.request.seed if not done else _later_seed(self.request.seed, done)
        key = self._conversations.key(self._conversation, grant.version)
        input_ids = self._prompt.followed_by(self.sampled.ids) if done else self._prompt
        return PartialGeneration(name, input_ids, sampling, seed, key, self.request.images, grant.adapter)

    def keep_labeled(self, tokens: PartialTokens) -> None:
        """Take over, of a partial generation that broke off, the tokens whose version is certain."""
        versions = tokens.labels()
        if len(versions) < len(tokens.sampled):
            tokens.finish = None  # what ended it may be among the others
        self.keep(tokens, versions)

    def keep(self, tokens: PartialTokens, versions: array[int]) -> None:
        """Take over the first tokens of a partial generation, those that have a version."""
        count = len(versions)
        self.sampled.extend(tokens.sampled.ids[:count], tokens.sampled.logprobs[:count], versions)
        if tokens.columns:
            self.columns = joined_columns(self.columns, tokens.columns, len(self._prompt) + len(self.sampled))
        if tokens.finish == "stop":
            self.finish = FinishReason.STOP
        elif tokens.finish == "length" or len(self.sampled) >= self.request.sampling.max_new_tokens:
            self.finish = FinishReason.LENGTH

    def generation(self) -> Generation:
        """The complete answer."""
        assert self.finish is not None
        return Generation.of(self.sampled, self.finish, self.columns)


class PartialTokens:
    """The tokens of one partial generation as they arrive.

    Args:
        grant: of the slot in which the partial generation was asked for.
        most: tokens that were asked for.
    """

    def __init__(self, grant: Grant, most: int) -> None:
        self._grant = grant
        self._most = most
        self.sampled = SampledTokens()
        self.finish: str | None = None
        self.columns: Mapping[str, Values] = {}
        self._spans: Sequence[tuple[str, int, int]] = ()

    def add(self, chunk: Chunk) -> None:
        """Tokens have arrived.

        Raises:
            ServerLostError: they are no tokens.
        """
        try:
            self.sampled.extend(chunk.output_ids, chunk.logprobs)
        except (TypeError, OverflowError) as error:
            raise ServerLostError(f"sent invalid tokens: {error}") from None
        self.finish, self.columns = chunk.finish, chunk.columns
        if chunk.spans is not None:
            self._spans = chunk.spans

    def fault(self) -> str:
        """What shows that nobody has sampled all that has arrived so; empty where nothing does."""
        if len(self.sampled) > self._most:
            return f"{len(self.sampled)} tokens where {self._most} were asked for"
        return self.sampled.fault(self._grant.vocabulary)

    def labels(self) -> array[int]:
        """The versions of the first tokens, as far as the server's labels are this run's."""
        if not self._grant.labels_tokens:  # its weights do not change while the slot is held
            return array("i", [self._grant.version]) * len(self.sampled)
        versions = array("i")
        for label, start, end in self._spans:
            number = label.removeprefix(self._grant.run_id)
            if f"{self._grant.run_id}{number}" != label or not number.isdecimal() or start != len(versions):
                break
            versions += array("i", [int(number)]) * (end - start)
        return versions[: len(self.sampled)]

    def versions(self) -> array[int]:
        """The version of each token.

        Raises:
            ServerLostError: the server's labels do not cover the tokens, or are none of this run's.
        """
        if len(versions := self.labels()) < (count := len(self.sampled)):
            message = f"labels {len(versions)} of {count} tokens with weights of this run: {self._spans!r:.200}"
            raise ServerLostError(f"{message}; another program may have changed them")
        return versions


def is_resumable(sampling: SamplingParameters) -> bool:
    """Whether a server that knows only the tokens can go on: stop texts and penalties look at what is its own."""
    has_penalty = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return not (has_penalty or sampling.stop)


def _later_seed(seed: int, place: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{place}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
