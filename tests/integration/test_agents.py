"""Unchanged programs of the examples, trained: by an SDK and in another language, in workers of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
AGENTS = Path(__file__).parents[2] / "examples" / "agents"
SMALL = ["steps=3", "model.path=model", "model.source=null", "sampling.max_new_tokens=8", "evaluation.limit=4"]
SMALL += ["rollout.batch_size=2", "rollout.group_size=2", "algorithm.group_stages=[]", "run_dir=run"]
SMALL += ["evaluation.every=3"]


@pytest.mark.parametrize("language", ["python", "javascript"])
def test_an_agent_of_an_example_is_trained(workplace: Workplace, language: str) -> None:
    for name in ("sums.py", "sums.js", "sums.yaml"):
        shutil.copy(AGENTS / name, workplace.folder)
        assert len((AGENTS / name).read_text().splitlines()) <= 80
    words = ["rollout.workers=2"]
    if language == "javascript":
        if shutil.which("node") is None:
            pytest.skip("node is not installed")
        command = {"type": "command", "command": ["node", str(workplace.folder / "sums.js")]}
        words = [f"workflow.agent={json.dumps(command)}"]
    done = workplace.areal("run", "sums.yaml", *SMALL, *words)
    assert done.code == 0, done.err
    last = {name: value for line in workplace.metrics() for name, value in line.items()}
    assert last["step"] == 3
    assert last["agents/turns"] == last["agents/conversations"] == 1.0
    assert last["evaluation/agents/turns"] == 1.0
    assert last["agents/lost_answers"] == last["agents/rewritten_prefixes"] == 0.0
    assert last["agents/generating_s"] > 0.0
    assert workplace.areal("audit", "run").code == 0
