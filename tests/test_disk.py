"""Writes that are refused say which disk, whichever library was told of it."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from areal_core.disk import (
    DiskError,
    append_line,
    replacing_folder,
    require_room,
    retry_refused,
    settle_folder,
    writing,
)

if TYPE_CHECKING:
    from collections.abc import Callable


LARGE = torch.zeros(1_000_000)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(bytes(4_000_000)),
        lambda path: torch.save({"x": LARGE}, path),
        lambda path: save_file({"x": LARGE}, path),
    ],
    ids=["a file", "torch", "safetensors"],
)
def test_a_full_disk_is_told_in_one_sentence(small_disk: Path, write: Callable[[Path], None]) -> None:
    with (
        pytest.raises(DiskError, match=r"^the checkpoint cannot be written to .*: the disk is full") as raised,
        writing("the checkpoint", small_disk),
    ):
        write(small_disk / "file")
    assert re.search(r"KiB of [\d.,]+ [KM]iB are free on the disk of", str(raised.value))


def test_a_busy_mount_is_not_called_a_full_disk(small_disk: Path) -> None:
    """A mount point cannot be renamed. The hint was to free some space."""
    with (
        pytest.raises(DiskError, match=r"the model cannot be written to .*: Device or resource busy") as raised,
        replacing_folder("the model", small_disk) as fresh,
    ):
        fresh.mkdir()
    assert raised.value.hints == ("nothing committed is lost: remove the cause, then continue with --resume",)


def test_an_error_that_is_none_of_the_disks_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="parameter"), writing("the checkpoint", tmp_path):
        raise KeyError("parameter")


def test_a_line_is_appended_whole_or_not_at_all(small_disk: Path) -> None:
    path = small_disk / "lines"
    append_line("the lines", path, "first")
    with pytest.raises(DiskError, match="the lines cannot be written"):
        append_line("the lines", path, "x" * 4_000_000)
    assert path.read_text() == "first\n"
    append_line("the lines", path, "second")
    assert path.read_text() == "first\nsecond\n"


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for text in ("first", "second"):
        with replacing_folder("the model", folder) as fresh:
            fresh.mkdir()
            (fresh / "weights").write_text(text)
            assert not files(folder) or files(folder) == {"weights": "first"}
        assert files(tmp_path) == {"model/weights": text}

    def fail() -> None:
        with replacing_folder("the model", folder) as fresh:
            fresh.mkdir()
            (fresh / "weights").write_text("third")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert files(tmp_path) == {"model/weights": "second"}


def test_everything_is_synced_before_a_folder_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system is asked, in order."""
    done: list[str] = []

    def fsync(descriptor: int) -> None:
        done.append(f"sync {os.path.basename(os.readlink(f'/proc/self/fd/{descriptor}'))}")  # noqa: PTH115, PTH119

    rename = Path.rename
    monkeypatch.setattr(Path, "rename", lambda path, to: (done.append(f"rename {path.name}"), rename(path, to))[1])
    monkeypatch.setattr("areal_core.disk.os.fsync", fsync)
    (tmp_path / "model").mkdir()
    with replacing_folder("the model", tmp_path / "model") as fresh:
        fresh.mkdir()
        (fresh / "weights").write_text("new")
    parent = f"sync {tmp_path.name}"
    assert done == ["sync weights", "sync .model.new", parent, "rename model", "rename .model.new", parent]


def test_a_folder_that_was_killed_between_its_renames_is_put_right(tmp_path: Path) -> None:
    (tmp_path / ".model.former").mkdir()
    (tmp_path / ".model.former/weights").write_text("old")
    settle_folder(tmp_path / "model")
    assert files(tmp_path) == {"model/weights": "old"}
    settle_folder(tmp_path / "model")
    assert files(tmp_path) == {"model/weights": "old"}


def test_room_is_asked_for(small_disk: Path) -> None:
    require_room("a checkpoint", small_disk.parent, 1)
    with pytest.raises(DiskError, match=r"it takes 100.0 MiB"):
        require_room("a checkpoint", small_disk / "not" / "yet", 100 << 20)
    (small_disk / "taken").write_bytes(bytes(shutil.disk_usage(small_disk).free - 4096))
    with pytest.raises(DiskError, match=r"it takes 0.5 KiB, and the disk is full"):
        require_room("a line", small_disk, 512)


def test_a_disk_is_given_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal_core.disk.PATIENCE_S", 0.3)
    monkeypatch.setattr("areal_core.disk.RETRY_INTERVAL_S", 0.1)
    told: list[str] = []

    def write() -> None:
        raise DiskError("no room")

    with pytest.raises(DiskError, match="no room"):
        retry_refused(write, told.append)
    assert told == ["no room; retrying for 0.3 s"]
