"""Text and bytes of single tokens, for the log-probabilities of responses."""

from __future__ import annotations

import json
import re
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""Spelling of a single byte in SentencePiece's vocabularies."""
_PRINTED: Final = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
"""Bytes that byte-level vocabularies write as the character with the same number. The others are numbered from 256."""
_OTHERS: Final = [byte for byte in range(256) if byte not in _PRINTED]
BYTES: Final = {chr(byte): byte for byte in _PRINTED} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""Byte of each character of a byte-level vocabulary."""


class TokenTexts:
    """Converts tokens to their text and bytes.

    Args:
        tokenizer: tokenizer of the model.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def of(self, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
        """Return the text and the bytes of each token.

        A token that is a part of a character has its own bytes, and the replacement character as text.
        """
        spellings = self._tokenizer.convert_ids_to_tokens(list(ids))
        pieces = [self._bytes(token, spelling or "") for token, spelling in zip(ids, spellings, strict=True)]
        return [(piece.decode("utf-8", "replace"), list(piece)) for piece in pieces]

    @cached_property
    def _added(self) -> dict[int, str]:
        """Text of added tokens, by id. It is not encoded the way the vocabulary is."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return {token: added_token.content for token, added_token in added.items()}

    @cached_property
    def _decoder(self) -> str:
        """JSON description of how the tokenizer turns pieces into text; empty if unknown."""
        decoder = getattr(getattr(self._tokenizer, "backend_tokenizer", None), "decoder", None)
        return "" if decoder is None else json.dumps(json.loads(decoder.__getstate__()), ensure_ascii=False)

    def _bytes(self, token: int, spelling: str) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        if '"ByteLevel"' in self._decoder and all(letter in BYTES for letter in spelling):
            return bytes(BYTES[letter] for letter in spelling)
        if byte := _BYTE.fullmatch(spelling):
            return bytes([int(byte[1], 16)])
        if "\u2581" in self._decoder:  # SentencePiece's space
            return spelling.replace("\u2581", " ").encode()
        if '"WordPiece"' in self._decoder or not self._decoder:
            return str(self._tokenizer.decode([token])).encode()
        return spelling.encode()
