"""areal-vision is an extra: text is generated and trained on without it, and a VLM names it."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal_core.testing.conformance import make_model

HIDDEN = "import runpy, sys; sys.modules['areal_vision'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
PROGRAM = Path(__file__).with_name("without_vision_program.py")


@pytest.mark.slow
def test_text_needs_no_areal_vision_and_a_vlm_names_it(folder, tmp_path):
    words = [str(PROGRAM), str(make_model(tmp_path / "text")), str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    told = done.stdout.splitlines()
    assert len(told) == 2
    for line, plugin in zip(told, ("fsdp", "hf"), strict=True):
        assert line.startswith("areal_vision.places is needed here, and is not installed pip install ")
        assert f"areal_{plugin}[vision]" in line
