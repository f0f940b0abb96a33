"""areal-vision is an extra: text is generated and trained on without it, with a VLM too."""

import subprocess
import sys
from pathlib import Path

import pytest

from areal_testing.conformance import make_model

HIDDEN = "import runpy, sys; sys.modules['areal_vision'] = None; runpy.run_path(sys.argv[1], run_name='__main__')"
PROGRAM = Path(__file__).with_name("without_vision_program.py")


@pytest.mark.slow
def test_text_needs_no_areal_vision(folder, tmp_path):
    words = [str(PROGRAM), str(make_model(tmp_path / "text")), str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN, *words], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
