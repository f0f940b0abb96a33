"""docs/interfaces.md is what the interfaces say, and says what an inference engine is given."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from areal_core import interfaces
from areal_core.plugins import KINDS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_page_is_current_and_has_every_kind_and_every_protocol():
    command = [sys.executable, str(ROOT / "docs" / "interfaces_page.py")]
    made = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    written = (ROOT / "docs" / "interfaces.md").read_text()
    assert written == made, "write it anew: python docs/interfaces_page.py > docs/interfaces.md"
    for kind in set(KINDS) - {"presets", "commands", "health_checks"}:
        assert f"## `{kind}`" in written
    protocols = [name for name in interfaces.__all__ if getattr(getattr(interfaces, name), "_is_protocol", False)]
    assert [name for name in protocols if f"### `{name}`" not in written] == []


def test_what_the_constructor_of_an_engine_is_given_is_what_the_run_gives():
    tree = ast.parse((ROOT / "areal_core" / "runs" / "engines.py").read_text())
    (given,) = [
        {keyword.arg for keyword in node.keywords}
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("inference_engine.build")
    ]
    documentation = interfaces.InferenceEngine.__doc__ or ""
    assert [name for name in sorted(given) if f"`{name}`" not in documentation] == []
