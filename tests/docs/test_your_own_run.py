"""The page "your own run" says what works: its files are written out and its commands run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "your-own-run.md"
BLOCKS = re.compile(r"```(?:python|yaml)\n# (?P<name>my_\w+\.\w+)\n(?P<text>.*?)```", re.DOTALL)
HANG_S = 280


@pytest.mark.slow
def test_the_page_works_as_written(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    files = {found["name"]: found["text"] for found in BLOCKS.finditer(text)}
    assert {"my_data.py", "my_reward.py", "my_run.yaml"} <= set(files)
    # Shorter, for the sake of the test: neither the model's fine-tuning nor the run needs to lead anywhere.
    short = files["my_run.yaml"].replace("steps: 40", "steps: 2")
    files["my_run.yaml"] = short.replace("source: grpo/addition_model", "source: {type: grpo/addition_model, steps: 2}")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    commands = text.split("```sh\n")[1].split("```")[0].splitlines()
    assert len(commands) == 4
    environment = {**os.environ, "AREAL_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "areal"
        done = subprocess.run(
            [sys.executable, "-m", "areal_core", *words],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    assert "clean" in done.stdout
