"""docs/config.md is what the models say, and has the settings of plugins where it is asked for them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def page(*plugins: str) -> str:
    command = [sys.executable, str(ROOT / "docs" / "config_page.py"), *plugins]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_the_page_of_the_documentation_is_current():
    written = (ROOT / "docs" / "config.md").read_text()
    assert written == page(), "write it anew: python docs/config_page.py > docs/config.md"


def test_every_key_of_every_component_of_the_first_party_plugins_is_described():
    pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")
    shown = page("grpo", "hf", "fsdp", "rewards", "trackers", "sglang", "vllm", "slurm", "sandboxes")
    assert "### `fsdp/fsdp`" in shown
    assert [line for line in shown.splitlines() if line.endswith("|  |")] == []
