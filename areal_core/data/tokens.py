"""Token ids and sampled tokens in growing arrays of numbers, which are ten times cheaper to read than Python lists.

This module does not import torch, because rollout workers use it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

HIGHEST_LOGPROB = 1e-2
"""Upper bound of a log-probability: 0 plus rounding error."""


def logprob_fault(logprobs: array[float]) -> str:
    """Describe the first value that is no log-probability; empty if all are finite and at most 0 plus rounding error.

    Args:
        logprobs: an array of type `f` (float32).
    """
    values = np.frombuffer(logprobs, np.float32)
    if not len(values) or (np.isfinite(values.sum(dtype=np.float64)) and values.max() <= HIGHEST_LOGPROB):
        return ""
    odd = next(value for value in logprobs if not -np.inf < value <= HIGHEST_LOGPROB)
    return f"{odd!r} as a log-probability"


class TokenIds(Sequence[int]):
    """A growing sequence of token ids, such as those of a conversation, with its JSON.

    Each turn sends all ids to a server. The JSON of one turn is kept and extended for the next.

    Args:
        ids: the first token ids. A copy of `TokenIds` shares nothing with the original, but keeps its JSON.

    Raises:
        TypeError: an id is not an integer.

    Example:
        >>> from areal_core.data import TokenIds
        >>> conversation = TokenIds([1, 2, 3])
        >>> conversation.extend([4, 5])
        >>> conversation[-2:], bytes(conversation.json())
        ([4, 5], b'[1,2,3,4,5]')
        >>> conversation.followed_by([6]).tolist()
        [1, 2, 3, 4, 5, 6]
    """

    __slots__ = ("_ids", "_text", "_written")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self._ids: array[int] = ids._ids[:] if isinstance(ids, TokenIds) else array("q", ids)
        self._text, self._written = bytearray(), 0
        if isinstance(ids, TokenIds):
            ids.json()
            self._text, self._written = ids._text[:], ids._written

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        """Return `ids` if it is a `TokenIds`, else a new one."""
        return ids if isinstance(ids, TokenIds) else cls(ids)

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __getitem__(self, place):  # type: ignore[no-untyped-def]
        return self._ids[place] if isinstance(place, int) else self._ids[place].tolist()

    def __eq__(self, other: object) -> bool:
        return self._ids == other._ids if isinstance(other, TokenIds) else self.tolist() == other

    __hash__ = None  # type: ignore[assignment]

    def extend(self, ids: Iterable[int]) -> None:
        """Append ids. An array of type `q` is copied without a conversion."""
        self._ids.extend(ids)

    def followed_by(self, ids: Iterable[int]) -> TokenIds:
        """Return a copy with `ids` appended."""
        extended = TokenIds(self)
        extended.extend(ids)
        return extended

    def tolist(self) -> list[int]:
        """Return the ids as a new list."""
        return self._ids.tolist()

    def numpy(self) -> np.ndarray:
        """Return the ids as a new array [T] int64."""
        return np.array(self._ids)

    def bounds(self) -> tuple[int, int]:
        """Return the smallest and the largest id. The sequence must not be empty."""
        ids = np.frombuffer(self._ids, np.int64)
        return int(ids.min()), int(ids.max())

    def json(self) -> msgspec.Raw:
        """Return the ids as a JSON array."""
        if fresh := self._ids[self._written :]:
            self._text += b"," * bool(self._written) + msgspec.json.encode(fresh.tolist())[1:-1]
            self._written = len(self._ids)
        return msgspec.Raw(b"[" + bytes(self._text) + b"]")


class SampledTokens:
    """Sampled tokens with their log-probabilities and weight versions.

    Attributes:
        ids: token ids, an array of type `q` (int64).
        logprobs: log-softmax(logits / temperature) of each token under the weights that sampled it, without truncation
            (top-p, top-k); an array of type `f` (float32).
        versions: weight version that sampled each token, an array of type `i` (int32).
        top_ids: the K likeliest tokens at the position of each token, one position behind another; an array of type `i`
            (int32). Empty if the request has no `top_logprobs`.
        top_logprobs: their log-probabilities, finite, an array of type `f` (float32).

    Raises:
        TypeError, OverflowError: a value does not fit these types.

    Example:
        >>> from areal_core.data import SampledTokens
        >>> sampled = SampledTokens()
        >>> sampled.extend([4, 5], logprobs=[-0.5, -0.25], versions=[0, 0])
        >>> sampled.extend([9], logprobs=[float("nan")], versions=[1])
        >>> len(sampled), sampled.versions.tolist()
        (3, [0, 0, 1])
        >>> sampled.fault(vocabulary=32)
        'nan as a log-probability'
        >>> tops = {"top_ids": [4, 7, 5, 4], "top_logprobs": [-0.5, -1.0, -0.25, -3.0]}  # two for each token
        >>> with_tops = SampledTokens([4, 5], [-0.5, -0.25], [0, 0], **tops)
        >>> with_tops.top_count, with_tops.first(1).top_ids.tolist()
        (2, [4, 7])
    """

    __slots__ = ("ids", "logprobs", "top_ids", "top_logprobs", "versions")

    def __init__(
        self,
        ids: Iterable[int] = (),
        logprobs: Iterable[float] = (),
        versions: Iterable[int] = (),
        top_ids: Iterable[int] = (),
        top_logprobs: Iterable[float] = (),
    ) -> None:
        self.ids, self.logprobs, self.versions = array("q", ids), array("f", logprobs), array("i", versions)
        self.top_ids, self.top_logprobs = array("i", top_ids), array("f", top_logprobs)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def top_count(self) -> int:
        """K: number of `top_ids` of each token. 0 without tokens."""
        return len(self.top_ids) // max(1, len(self.ids))

    def extend(
        self,
        ids: Iterable[int],
        logprobs: Iterable[float],
        versions: Iterable[int] = (),
        top_ids: Iterable[int] = (),
        top_logprobs: Iterable[float] = (),
    ) -> None:
        """Append tokens with their log-probabilities, versions and likeliest tokens."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)
        self.top_ids.extend(top_ids)
        self.top_logprobs.extend(top_logprobs)

    def first(self, count: int) -> SampledTokens:
        """Return a copy of the first tokens, with everything that belongs to them."""
        tops = count * self.top_count
        return SampledTokens(
            self.ids[:count],
            self.logprobs[:count],
            self.versions[:count],
            self.top_ids[:tops],
            self.top_logprobs[:tops],
        )

    def fault(self, vocabulary: int = 1 << 62, top_count: int | None = None) -> str:
        """Describe what is impossible about these tokens; empty if nothing is. Versions are not checked.

        Token ids must lie in the vocabulary, and log-probabilities must be finite and at most 0 plus rounding error.
        The probabilities of the likeliest tokens at one position must not exceed 1 together.

        Args:
            vocabulary: number of token ids of the model.
            top_count: number of likeliest tokens that were requested; None for any number, the same for each token.
        """
        if len(self.ids) != len(self.logprobs):
            return f"{len(self.ids)} tokens with {len(self.logprobs)} log-probabilities"
        expected = len(self.ids) * (self.top_count if top_count is None else top_count)
        if not len(self.top_ids) == len(self.top_logprobs) == expected:
            got = f"{len(self.top_ids)} likeliest tokens and {len(self.top_logprobs)} of their log-probabilities"
            return f"{got} for {len(self.ids)} tokens, instead of {expected} each"
        if not self.ids:
            return ""
        ids = np.frombuffer(self.ids, np.int64)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            return f"{low if low < 0 else high} as a token" + (f" of {vocabulary}" if vocabulary < 1 << 62 else "")
        if fault := logprob_fault(self.logprobs):
            return fault
        return self._top_fault(vocabulary) if self.top_ids else ""

    def _top_fault(self, vocabulary: int) -> str:
        ids, logprobs = np.frombuffer(self.top_ids, np.int32), np.frombuffer(self.top_logprobs, np.float32)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            return f"{low if low < 0 else high} as one of the likeliest tokens"
        if not np.isfinite(logprobs).all():
            odd = next(value for value in self.top_logprobs if not np.isfinite(value))
            return f"{odd!r} as the log-probability of one of the likeliest tokens"
        total = float(np.exp(logprobs, dtype=np.float64).reshape(len(self.ids), -1).sum(1).max())
        if total > 1 + HIGHEST_LOGPROB:
            return f"{total:g} as the probability of the {self.top_count} likeliest tokens together"
        return ""
