"""docs/guides/from-python.md: its calls are understood, and what it says of `Run` is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import areal_core
from areal_core import trl
from areal_core.config import resolve
from areal_core.config.yaml_text import dump
from areal_core.library import start

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "from-python.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_calls_of_the_page_are_whole_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `areal run` is given is read as it reads it; nothing is trained."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    read: list[Any] = []

    def read_config(config: dict[str, Any], run_dir: Path, plugins: list[str]) -> None:
        (tmp_path / "run.yaml").write_text(dump(config))
        read.append(resolve("run.yaml", plugins, environment={}).config)

    monkeypatch.setattr(start, "run_command", read_config)
    monkeypatch.setattr(start, "Run", lambda folder: type("Run", (), {"metrics": folder}))
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in BLOCKS:
        exec(block, names)
    assert [config.steps for config in read] == [100, 200]
    assert read[1].train_engine.keywords()["learning_rate"] == 2e-6
    assert names["GRPOTrainer"] is trl.GRPOTrainer


def test_what_a_run_has_is_there() -> None:
    table = PAGE.partition("## What you get")[2].partition("## ")[0]
    named = set(re.findall(r"`run\.(\w+)", table))
    assert named >= {"folder", "status", "metrics", "samples", "model", "best", "resume"}
    assert [name for name in named - {"folder"} if not hasattr(areal_core.Run, name)] == []
