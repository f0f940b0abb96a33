"""A tracker is anybody's code in the trainer's process: whatever it does, the run says so or goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import Workplace

pytestmark = pytest.mark.slow

TRACKER = """
import os, sys, time

class Odd:
    def start(self, run_dir, config):
        pass

    def log(self, step, values):
        if step == 2:
            {does}

    def close(self):
        pass
"""


@pytest.mark.parametrize(
    ("does", "code", "words"),
    [
        pytest.param("sys.exit()", 0, "tracker Odd is switched off: SystemExit", marks=pytest.mark.nightly),
        ("os._exit(0)", 1, "trainer-0 ended before its work was done, with exit code 0"),
        pytest.param("time.sleep(3600)", 0, "tracker Odd has blocked for", marks=pytest.mark.nightly),
    ],
)
def test_what_it_does_is_told(workplace: Workplace, does: str, code: int, words: str) -> None:
    (workplace.folder / "odd.py").write_text(TRACKER.format(does=does))
    found = workplace.areal("run", "run.yaml", "run_dir=run", 'trackers=["odd.py:Odd"]')
    assert found.code == code, found.out + found.err
    assert words in found.out + found.err
    assert workplace.areal("audit", "run").code == 0
    if code == 0:
        assert len(workplace.metrics()) == 4
        assert (workplace.folder / "run/model/model.safetensors").is_file()
