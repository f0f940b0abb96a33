"""Where weights are written, and what happens where they have no room."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from areal_core.config.sections import PublicationSection
from areal_core.errors import RunError
from areal_core.messages.rollouts import Published, PublishWeights
from areal_core.training import publication as module
from areal_core.training.publication import Publication

if TYPE_CHECKING:
    from pathlib import Path

SIZE = 4 << 20


class Rollouts:
    """Takes over at once what is published."""

    def __init__(self) -> None:
        self.folders: list[Path] = []

    def request(self, message: Any) -> int:
        assert isinstance(message, PublishWeights)
        assert message.folder is not None
        assert (message.folder / "model.safetensors").stat().st_size > SIZE
        self.folders.append(message.folder.parent)
        return 1

    def wait(self, number: int, waiting_for: str) -> Published:
        return Published(needs_folder=False)


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Publishes versions of 4 MiB; what is free in each folder is as the test says, in MiB."""
    free = {"memory": 100, "disk": 100}
    engine = SimpleNamespace(named_full_parameters=lambda: iter([("weight", torch.zeros(SIZE // 4))]))
    monkeypatch.setattr(
        module.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free[folder.name] << 20, total=1 << 30)
    )
    rollouts = Rollouts()
    folders = [tmp_path / "memory", tmp_path / "disk"]
    made = Publication(PublicationSection(), engine, rollouts, folders, torch.float32)

    def publish(**changed):
        free.update(changed)
        made.publish(0)
        return rollouts.folders[-1].name

    return publish


def test_weights_go_to_the_disk_while_memory_has_no_room(published, capsys):
    """Decided anew at each publication."""
    assert published() == "memory"
    assert capsys.readouterr().err == ""
    assert published(memory=1) == "disk"
    told = capsys.readouterr().err
    assert "0.0 GB are free in" in told
    assert f"{os.sep}disk: only" in told
    assert published(memory=100) == "memory"


def test_no_room_anywhere_is_said_with_both_places(published):
    with pytest.raises(RunError, match=r"no room for weights of 0\.0 GB: only .*memory, .*disk"):
        published(memory=1, disk=1)


def test_old_versions_are_removed_wherever_they_are(published, tmp_path):
    for memory in (100, 1, 100, 100, 1):
        published(memory=memory)
    assert sorted(path.name for path in tmp_path.glob("*/version-*")) == ["version-4", "version-5"]


def test_a_folder_that_cannot_be_written_is_named(published, tmp_path):
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / ".version-1").write_text("no folder")
    with pytest.raises(RunError, match=r"weights of version 1 cannot be written to .*memory: File exists"):
        published()
