"""A model that is made before a run: Ctrl-C meanwhile, and one that the config cannot work with."""

from __future__ import annotations

import signal
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow

SOURCES = """
import signal, time
from pathlib import Path

class Deaf:
    def prepare(self, cache):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        cache.joinpath("begun").touch()
        time.sleep(3600)

class Made:
    def prepare(self, cache):
        return Path(__file__).parent / "model"
"""
HANG_S = 300


def test_preparing_a_model_ends_with_the_first_ctrl_c_however_deaf_it_is(workplace: Workplace) -> None:
    (workplace.folder / "sources.py").write_text(SOURCES)
    words = ["model.path=null", "model.source=sources.py:Deaf"]
    process = workplace.start("run", "run.yaml", "run_dir=run", *words)
    workplace.wait_for((workplace.folder / "cache" / "begun").exists, process)
    preparer = workplace.pid("model")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 130, out + err
    assert "stopped before the first checkpoint" in out + err
    assert subprocess.run(["kill", "-0", str(preparer)], capture_output=True, check=False).returncode


@pytest.mark.nightly
def test_a_model_that_was_made_is_held_against_the_config_before_anything_loads_it(workplace: Workplace) -> None:
    pytest.importorskip("peft", reason="adapters need it")
    (workplace.folder / "sources.py").write_text(SOURCES)
    words = ["model.path=null", "model.source=sources.py:Made", "train_engine.adapter={modules: [w_proj]}"]
    done = workplace.areal("run", "run.yaml", "run_dir=run", *words, timeout=HANG_S)
    assert done.code in (1, 2)
    assert "adapter.modules: no matrix in the model's layers is called w_proj" in done.err
    assert [path.name for path in (workplace.folder / "run" / "logs").glob("trainer*")] == []
