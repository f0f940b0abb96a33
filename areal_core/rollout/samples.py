"""Samples of the policy's answers for the report: one group for each weight version."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal_core.disk import append_line, replace_durably, writing

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.ledger.groups import PromptGroup
    from areal_core.messages.workflows import GroupOutcome

MOST_BYTES = 32 << 20
"""A larger file loses every second line, so that it covers the whole run."""


class SampleLog:
    """Appends a few episodes of the first group that finished under each version to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version = -1

    def saw(self, group: PromptGroup, outcome: GroupOutcome, version: int) -> None:
        """Log the group if it is the first one that has finished under `version`.

        A resume gives the numbers of lost groups to new ones. The digest of the tokens, which the ledger has too, tells
        which group a line is about.

        Raises:
            DiskError: the disk refuses; the next group is taken instead.
        """
        if version == self._version:
            return
        episodes = [
            {"text": e.text, "prompt_length": e.prompt_length, "reward": e.reward, "rewards": dict(e.rewards)}
            for e in outcome.shown
        ]
        digest = None if group.record is None else group.record.digest
        line = json.dumps({"version": version, "group": group.number, "digest": digest, "episodes": episodes})
        append_line("samples", self._path, line)
        self._version = version
        if self._path.stat().st_size > MOST_BYTES:
            with writing("samples", self._path):
                replace_durably(self._path, b"".join(self._path.read_bytes().splitlines(keepends=True)[::2]))
