"""Digests of what was trained on, computed alike by both halves of a run and compared by `areal audit`."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_core.data.batch import PackedBatch


def group_digests(batch: PackedBatch, groups: Sequence[tuple[int, range]]) -> dict[int, str]:
    """A digest of each group's token ids, lengths included.

    Args:
        batch: with `input_ids`, on the CPU.
        groups: number of each group and its sequences in the batch; groups without sequences have no digest.
    """
    offsets = batch.tokens.offsets.tolist()
    ids = batch["input_ids"].numpy()
    digests = {}
    for number, rows in groups:
        if not rows:
            continue
        digest = hashlib.blake2b(repr([offsets[i + 1] - offsets[i] for i in rows]).encode(), digest_size=16)
        digest.update(ids[offsets[rows.start] : offsets[rows.stop]].tobytes())
        digests[number] = digest.hexdigest()
    return digests


def chain_digests(before: str, groups: Iterable[tuple[int, str]]) -> str:
    """A digest of all steps up to one: of those `before` it, and of the groups that it was trained on."""
    step = json.dumps([before, sorted(groups)])
    return hashlib.blake2b(step.encode(), digest_size=16).hexdigest()
