"""The GPUs of a machine, as CUDA would show them to a process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from areal_core import gpus
from areal_core.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", ["0"]),
        ("3, 1", ["3", "1"]),
        ("0,1,", ["0", "1"]),
        ("0,-1,1", ["0"]),
        ("0,0", []),
        ("GPU-8932f937,GPU-d1a2", ["GPU-8932f937", "GPU-d1a2"]),
        ("MIG-GPU-8932f937/1/0", ["MIG-GPU-8932f937/1/0"]),
    ],
)
def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch, value: str, names: list[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    assert gpus.visible_gpus() == names
    assert gpus.count_gpus() == len(names)
    for number, name in enumerate(names):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        gpus.show_gpus([number])
        assert os.environ["CUDA_VISIBLE_DEVICES"] == name
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    with pytest.raises(RunError, match=f"GPU {len(names)} is not among the {len(names)} that CUDA_VISIBLE_DEVICES="):
        gpus.show_gpus([len(names)])


def test_a_number_that_the_machine_lacks_ends_the_list(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(gpus, "GPUS", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,99,1")
    assert gpus.visible_gpus() == ["0"]


def test_a_machine_whose_gpus_are_all_shown_counts_them_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus.visible_gpus() is None
    gpus.show_gpus([2, 5])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,5"
