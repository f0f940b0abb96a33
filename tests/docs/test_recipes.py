"""The configs and commands of docs/recipes.md, and the agent of docs/agents.md, are valid; nothing is trained."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from areal_core.cli import main
from areal_core.config import resolve

DOCS = Path(__file__).parents[2] / "docs"
PAGE = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("recipes.md", "agents.md"))
FILES = dict(re.findall(r"```(?:python|yaml)\n# (my_\w+\.\w+)\n(.*?)```", PAGE, re.DOTALL))
CONFIGS = [name for name in FILES if name.endswith(".yaml")]
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with every file of the page and some rows."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "my_rows.jsonl").write_text(json.dumps({"question": "1 + 1?", "answer": "2"}) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_valid(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "check", name]) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [line for line in COMMANDS if "--resume" not in line])
def test_a_command_has_a_valid_config(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = shlex.split(command)[1:]
    words = words if words[:2] == ["config", "check"] else ["config", "check", *words[1:]]
    assert main(words) == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if "--resume" in line])
def test_a_resume_is_understood(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.path=null", "model.source=grpo/addition_model"]  # a model that need not be there
    resolved = resolve("my_rl.yaml", (), words)
    (folder / "first").mkdir()
    (folder / "first" / "config.yaml").write_text(resolved.to_yaml())
    plugins = [record.as_dict() for record in resolved.provenance()]
    (folder / "first" / "plugins.json").write_text(json.dumps(plugins))
    assert main([*shlex.split(command)[1:], "--dry-run"]) == 0, capsys.readouterr().err
