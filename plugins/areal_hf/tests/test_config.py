"""Test the notes of the embedded engine's settings about a machine."""

import pytest

from areal_core import gpus as machine
from areal_core.config import resolve


@pytest.mark.parametrize(("gpus", "device", "has_note"), [(1, "auto", True), (1, "cpu", False), (0, "auto", False)])
def test_a_machine_with_a_gpu_gets_a_note_about_faster_engines(tmp_path, monkeypatch, gpus, device, has_note):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(machine, "GPUS", tmp_path)
    for number in range(gpus):
        (tmp_path / str(number)).mkdir()
    config = resolve(None, ["grpo"], [f"inference_engine.device={device}"]).config
    notes = " ".join(config.cross_notes())
    assert ("set inference_engine.type=auto" in notes) is has_note
