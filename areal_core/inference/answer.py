"""The answer to a request: the tokens so far, and the next partial generation.

A request may pass through several servers. A weight update or the loss of a server ends a partial generation, and the
next one continues after the tokens that are kept. Each token keeps the version that sampled it.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from areal_core.data import Generation, SampledTokens, TokenIds
from areal_core.data.tokens import logprob_fault
from areal_core.data.trajectory import FinishReason, joined_columns
from areal_core.inference.adapter import PartialGeneration
from areal_core.interfaces.inference import ServerLostError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from areal_core.data.trajectory import Values
    from areal_core.inference.adapter import Chunk
    from areal_core.interfaces.inference import GenerationRequest, Grant, SamplingParameters, UpdateMode


REMEMBERED = 1 << 16
"""Number of conversations whose cache salt is remembered."""


class Conversations:
    """The cache salt of each conversation. Servers share a cached prefix only between requests with one salt.

    In `keep_cache`, the salt of a conversation is the version under which it began, so that later turns find their
    prefix after an update. A new conversation has the current version as salt, and so meets no older keys and values.
    In `recompute`, the salt is always the current version.

    Args:
        mode: update mode of the servers.
        remembered: number of conversations. The least recently used one is forgotten first; if it continues, it gets
            the salt of a new one.
    """

    def __init__(self, mode: UpdateMode, remembered: int = REMEMBERED) -> None:
        self._keeps_cache = mode == "keep_cache"
        self._first_salt: Callable[[str], list[str]] = lru_cache(remembered)(lambda conversation: [])

    def salt(self, conversation: str, version: int) -> str:
        """Return the cache salt for the next request of a conversation, which starts under weights of a version."""
        if not self._keeps_cache:
            return str(version)
        first = self._first_salt(conversation)
        if not first:
            first.append(str(version))
        return first[0]


class Answer:
    """The answer to a request, from one or more partial generations.

    Args:
        request: the request. If it names no conversation, it is a conversation of its own.
        conversations: the cache salts.
        client_id: prefix of the names of partial generations, unique to this client.

    Attributes:
        partials: number of partial generations so far.
        sampled: the tokens that are kept.
        columns: further values of the tokens; see `Generation`.
        prompt_logprobs: those of the partial generation that brought the first token; see `Generation`.
        finish: why the answer is complete; None while it is not.
    """

    def __init__(self, request: GenerationRequest, conversations: Conversations, client_id: str = "") -> None:
        self.request = request
        self._client_id = client_id
        self._prompt = TokenIds.of(request.input_ids)
        self.partials = 0
        self.sampled = SampledTokens()
        self.columns: dict[str, Values] = {}
        self.prompt_logprobs = array("f")
        self.finish: FinishReason | None = None
        self._can_show = request.on_tokens is not None and is_resumable(request.sampling)
        self._shown = 0
        self._conversations = conversations
        self._conversation = request.conversation or f"request {request.request_id}"

    def next_partial(self, grant: Grant) -> PartialGeneration:
        """Return the request for the rest of the answer, to the server of a slot.

        Raises:
            ValueError: the caller has seen tokens that a lost server took with it.
        """
        if self._shown > len(self.sampled):
            raise ValueError("a server failed after the caller had received its tokens, which cannot be kept")
        if not is_resumable(self.request.sampling):
            self.sampled, self.columns = SampledTokens(), {}
        self.partials += 1
        done, sampling = len(self.sampled), self.request.sampling
        if done:
            sampling = replace(
                sampling,
                max_new_tokens=sampling.max_new_tokens - done,
                min_new_tokens=max(0, sampling.min_new_tokens - done),
                prompt_logprobs=False,  # they came with the first token
            )
        name = f"{self._client_id}{self.request.request_id}.{self.partials}"
        # With the same seed, a server would draw the random numbers of the first tokens again.
        seed = _later_seed(self.request.seed, done) if done else self.request.seed
        salt = self._conversations.salt(self._conversation, grant.version)
        input_ids = self._prompt.followed_by(self.sampled.ids) if done else self._prompt
        return PartialGeneration(name, input_ids, sampling, seed, salt, self.request.images, grant.adapter)

    def show(self, tokens: PartialTokens) -> None:
        """Pass the new tokens of a running partial generation to the caller, as far as they are certain to be kept."""
        if self._can_show:
            ids = tokens.sampled.ids[self._shown - len(self.sampled) : len(tokens.labels())]
            if not tokens.is_outside(ids):
                self._show(ids)

    def _show(self, ids: Sequence[int]) -> None:
        if ids and self._can_show:
            assert self.request.on_tokens is not None
            self._shown += len(ids)
            try:
                self.request.on_tokens(ids)
            except Exception as error:  # it would count as a fault of the server
                raise RuntimeError(f"on_tokens raised {type(error).__name__}: {error}") from error

    def keep_labeled(self, tokens: PartialTokens) -> None:
        """Keep the tokens of an interrupted partial generation whose version is certain."""
        versions = tokens.labels()
        if len(versions) < len(tokens.sampled):
            tokens.finish = None  # the stop token may be among the tokens that are dropped
        self.keep(tokens, versions)

    def keep(self, tokens: PartialTokens, versions: array[int]) -> None:
        """Keep the first tokens of a partial generation, as many as have a version."""
        count = len(versions)
        kept = tokens.sampled.first(count)
        if not self.sampled:
            self.prompt_logprobs = tokens.prompt_logprobs
        self.sampled.extend(kept.ids, kept.logprobs, versions, kept.top_ids, kept.top_logprobs)
        self._show(self.sampled.ids[self._shown :])
        if tokens.columns:
            self.columns = joined_columns(self.columns, tokens.columns, len(self._prompt) + len(self.sampled))
        if tokens.finish == "stop":
            self.finish = FinishReason.STOP
        elif tokens.finish == "length" or len(self.sampled) >= self.request.sampling.max_new_tokens:
            self.finish = FinishReason.LENGTH

    def generation(self) -> Generation:
        """Return the complete answer."""
        assert self.finish is not None
        of_prompt = self.prompt_logprobs.tolist() if self.request.sampling.prompt_logprobs else None
        return Generation.of(self.sampled, self.finish, self.columns, of_prompt)


class PartialTokens:
    """The tokens of one partial generation as they arrive.

    Args:
        grant: the slot of the partial generation.
        sampling: its sampling settings.
        input_tokens: number of its input tokens.
    """

    def __init__(self, grant: Grant, sampling: SamplingParameters, input_tokens: int) -> None:
        self._grant = grant
        self._sampling = sampling
        self._prompt_logprobs = input_tokens - 1 if sampling.prompt_logprobs else 0
        self.sampled = SampledTokens()
        self.prompt_logprobs = array("f")
        self.finish: str | None = None
        self.columns: Mapping[str, Values] = {}
        self._spans: Sequence[tuple[str, int, int]] = ()

    def add(self, chunk: Chunk) -> None:
        """Add tokens that have arrived.

        Raises:
            ServerLostError: they are not integers with log-probabilities.
        """
        try:
            self.sampled.extend(
                chunk.output_ids, chunk.logprobs, top_ids=chunk.top_ids, top_logprobs=chunk.top_logprobs
            )
            self.prompt_logprobs.extend(chunk.prompt_logprobs)
        except (TypeError, OverflowError) as error:
            raise ServerLostError(f"sent invalid tokens: {error}") from None
        self.finish, self.columns = chunk.finish, chunk.columns
        if chunk.spans is not None:
            self._spans = chunk.spans

    def is_outside(self, ids: Iterable[int]) -> bool:
        """Return whether some of these tokens cannot be the model's."""
        return any(not 0 <= token < self._grant.vocabulary for token in ids)

    def fault(self) -> str:
        """Return what shows that the server did not sample these tokens from the model; empty if nothing does."""
        if len(self.sampled) > self._sampling.max_new_tokens:
            return f"{len(self.sampled)} tokens where {self._sampling.max_new_tokens} were asked for"
        if self.sampled and len(self.prompt_logprobs) != self._prompt_logprobs:
            return f"{len(self.prompt_logprobs)} log-probabilities of the prompt instead of {self._prompt_logprobs}"
        of_sampled = self.sampled.fault(self._grant.vocabulary, self._sampling.top_logprobs)
        return of_sampled or logprob_fault(self.prompt_logprobs)

    def labels(self) -> array[int]:
        """Return the versions of the first tokens, up to the first label that is not this run's."""
        if not self._grant.labels_tokens:  # the server's weights do not change while the slot is leased
            return array("i", [self._grant.version]) * len(self.sampled)
        versions = array("i")
        for label, start, end in self._spans:
            number = label.removeprefix(self._grant.run_id)
            if f"{self._grant.run_id}{number}" != label or not number.isdecimal() or start != len(versions):
                break
            versions += array("i", [int(number)]) * (end - start)
        return versions[: len(self.sampled)]

    def versions(self) -> array[int]:
        """Return the version of each token.

        Raises:
            ServerLostError: some tokens have no label, or one that is not this run's.
        """
        if len(versions := self.labels()) < (count := len(self.sampled)):
            message = f"labels {len(versions)} of {count} tokens with weights of this run: {self._spans!r:.200}"
            raise ServerLostError(f"{message}; another program may have changed them")
        return versions


def is_resumable(sampling: SamplingParameters) -> bool:
    """Return whether another server can continue from the tokens alone.

    With stop texts and penalties it cannot: a server applies them to the text and the tokens that it has generated.

    Example:
        >>> from areal_core.servers import SamplingParameters, is_resumable
        >>> is_resumable(SamplingParameters(top_p=0.9)), is_resumable(SamplingParameters(stop=("END",)))
        (True, False)
    """
    has_penalty = sampling.repetition_penalty != 1 or sampling.frequency_penalty or sampling.presence_penalty
    return not (has_penalty or sampling.stop)


def _later_seed(seed: int, position: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
