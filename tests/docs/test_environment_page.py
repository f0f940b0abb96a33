"""docs/extend/environment.md: the environment of the page is the one of the examples, and its config trains on it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from areal_core.cli import main

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "extend" / "environment.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```(?:python|yaml)\n# (\w+\.(?:py|yaml))\n(.*?)```", PAGE, re.DOTALL))


def bodies(text: str) -> dict[str, str]:
    """The functions of a module without annotations, by name."""
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef):
            for argument in node.args.args:
                argument.annotation = None
            node.returns = None
            found[node.name] = ast.dump(node)
    return found


def test_the_environment_of_the_page_is_that_of_the_examples() -> None:
    example = (ROOT / "examples" / "environments" / "sums.py").read_text(encoding="utf-8")
    assert bodies(FILES["sums.py"]) == bodies(example)


@pytest.mark.slow
def test_the_config_of_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "own.yaml", "steps=2", f"run_dir={tmp_path / 'run'}", "rollout.batch_size=2"]) == 0
    assert "2 steps" in capsys.readouterr().out
