"""Which folders are on a tmpfs."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_core.disk import is_in_memory


def test_a_folder_of_a_small_tmpfs_is_in_memory_and_its_neighbor_is_not(small_disk):
    assert is_in_memory(small_disk / "below")
    assert is_in_memory(small_disk.parent) == is_in_memory(small_disk.parent.parent)
    assert not is_in_memory(Path("/proc/self"))


def test_shared_memory_is_in_memory():
    if not Path("/dev/shm").is_dir():
        pytest.skip("this machine has no /dev/shm")
    assert is_in_memory(Path("/dev/shm/some/folder"))
