"""The log of samples: one group for each version, and a file that does not grow with the run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from areal_core.ledger.groups import PromptGroup
from areal_core.messages.workflows import EpisodeShown, GroupOutcome
from areal_core.rollout import samples
from areal_core.rollout.samples import SampleLog

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


FACTS = GroupOutcome((1.0,), {}, (EpisodeShown("x" * 100, 1.0, {}),), 1, "", is_kept=True)


def test_a_long_run_is_shown_whole_and_its_past_thinner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "MOST_BYTES", 10_000)
    path = tmp_path / "samples.jsonl"
    log = SampleLog(path)
    for version in range(1000):
        log.saw(PromptGroup(2 * version, (0, 0)), FACTS, version)
        log.saw(PromptGroup(2 * version + 1, (0, 0)), FACTS, version)
        assert path.stat().st_size <= 10_000
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    versions = [line["version"] for line in lines]
    assert all(line["group"] == 2 * line["version"] for line in lines), "the first group of a version"
    assert versions == sorted(versions)
    assert len(versions) > 20
    assert versions[0] == 0
    assert versions[-1] >= 998
