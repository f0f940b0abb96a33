"""Tokens in growing arrays of numbers: a list of Python's own objects costs ten times as much to look through.

Nothing here imports torch: rollout workers live on it.
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
"""Of a token: 0, and what rounding may add."""


class TokenIds(Sequence[int]):
    """Token ids that are only appended to, such as those of a conversation, and their JSON.

    A server is sent all of them in each turn. What was written as JSON for one turn is kept for the next.

    Args:
        ids: the first ones; of others of this kind what was written is kept too, by both.

    Raises:
        TypeError: one is no integer.
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
        """The same, or made of something else."""
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
        """Append some; an array of type q is copied as it is."""
        self._ids.extend(ids)

    def followed_by(self, ids: Iterable[int]) -> TokenIds:
        """These and then some more; neither changes the other."""
        both = TokenIds(self)
        both.extend(ids)
        return both

    def tolist(self) -> list[int]:
        """As a list of its own."""
        return self._ids.tolist()

    def numpy(self) -> np.ndarray:
        """[T] int64, a copy."""
        return np.array(self._ids)

    def bounds(self) -> tuple[int, int]:
        """The smallest and the largest; there must be one."""
        ids = np.frombuffer(self._ids, np.int64)
        return int(ids.min()), int(ids.max())

    def json(self) -> msgspec.Raw:
        """As a JSON array."""
        if fresh := self._ids[self._written :]:
            self._text += b"," * bool(self._written) + msgspec.json.encode(fresh.tolist())[1:-1]
            self._written = len(self._ids)
        return msgspec.Raw(b"[" + bytes(self._text) + b"]")


class SampledTokens:
    """Tokens that were sampled, with what is known of each.

    Attributes:
        ids: array of type q.
        logprobs: array of type f: log-softmax(logits / temperature) under the weights that sampled it, not truncated.
        versions: array of type i: the weight version that sampled it.

    Raises:
        TypeError, OverflowError: something is not of these types.
    """

    __slots__ = ("ids", "logprobs", "versions")

    def __init__(self, ids: Iterable[int] = (), logprobs: Iterable[float] = (), versions: Iterable[int] = ()) -> None:
        self.ids, self.logprobs, self.versions = array("q", ids), array("f", logprobs), array("i", versions)

    def __len__(self) -> int:
        return len(self.ids)

    def extend(self, ids: Iterable[int], logprobs: Iterable[float], versions: Iterable[int] = ()) -> None:
        """Append some."""
        self.ids.extend(ids)
        self.logprobs.extend(logprobs)
        self.versions.extend(versions)

    def fault(self, vocabulary: int = 1 << 62) -> str:
        """What shows that nobody has sampled these tokens so; empty where nothing does. Versions are not looked at.

        Args:
            vocabulary: how many token ids there are.
        """
        if len(self.ids) != len(self.logprobs):
            return f"{len(self.ids)} tokens with {len(self.logprobs)} log-probabilities"
        if not self.ids:
            return ""
        ids, logprobs = np.frombuffer(self.ids, np.int64), np.frombuffer(self.logprobs, np.float32)
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            return f"{low if low < 0 else high} as a token" + (f" of {vocabulary}" if vocabulary < 1 << 62 else "")
        if not np.isfinite(logprobs.sum(dtype=np.float64)) or logprobs.max() > HIGHEST_LOGPROB:
            odd = next(value for value in self.logprobs if not -np.inf < value <= HIGHEST_LOGPROB)
            return f"{odd!r} as a log-probability"
        return ""
