"""The programs in examples/programs and examples/tinker do what their first lines promise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

import pytest

from areal_core.config import resolve
from areal_core.programs import RunFolder, write_run_folder

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = ["model.source=null", "model.path=model", "sampling.max_new_tokens=4"]


def output_of(workplace: Workplace, name: str, *words: str) -> list[str]:
    """Run a program in the folder with the tiny model, and return the lines that it prints."""
    command = [sys.executable, str(EXAMPLES / name), *words]
    done = subprocess.run(
        command, cwd=workplace.folder, env=workplace.environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_generate_prints_the_answers_of_each_row(workplace: Workplace) -> None:
    few = ["evaluation.limit=2", "evaluation.samples_per_prompt=2"]
    lines = output_of(workplace, "programs/generate.py", "grpo/addition", *MODEL, *few)
    assert sorted(line.split("  ")[0] for line in lines) == ["row 0", "row 0", "row 1", "row 1"]
    assert all("  reward " in line for line in lines)


def test_rescore_prints_the_reward_and_the_length_of_each_answer(workplace: Workplace) -> None:
    path = f"model.path={workplace.folder / 'model'}"
    resolved = resolve("grpo/addition", overrides=["model.source=null", path])
    write_run_folder(resolved, RunFolder(workplace.folder / "run"))
    rows = [{"prompt": "16+32=", "completion": text, "answer": "48"} for text in ("48", "100")]
    (workplace.folder / "answers.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    lines = output_of(workplace, "programs/rescore.py", "run", "answers.jsonl")
    assert lines == ["reward 1  2 tokens  '48'", "reward 0  3 tokens  '100'"]


def test_debug_answer_shows_the_tokens_of_the_answer(workplace: Workplace) -> None:
    words = [*MODEL, "rollout.group_size=2"]
    text = "\n".join(output_of(workplace, "programs/debug_answer.py", "grpo/addition", "48", *words))
    assert "sample 1: reward" in text
    assert "update 0 of actor" in text
    assert "'48" in text


def test_seeds_prints_the_plan_of_a_run(workplace: Workplace) -> None:
    words = ["--seeds", "3", "--output", "seeds", "--dry-run"]
    lines = output_of(workplace, "programs/seeds.py", "grpo/addition", *MODEL, *words)
    assert lines.count("plan") == 1
    assert not (workplace.folder / "seeds").exists()


def test_the_loop_of_a_tinker_client_raises_its_reward(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tinker")
    monkeypatch.syspath_prepend(EXAMPLES.parent / "plugins" / "areal_tinker" / "tests")
    from chat_model import make_chat_model
    from tinker_server import serving

    model = make_chat_model(workplace.folder / "bytes", hidden=64, layers=2)
    with serving(workplace.folder, model, "--full") as server:
        workplace.environment |= {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-any"}
        *lines, path = output_of(workplace, "tinker/loop.py", str(model), "1e-2")
    rewards = [float(line.split()[3]) for line in lines]
    assert mean(rewards[:3]) < 0.2
    assert mean(rewards[-3:]) > 0.8
    assert path.startswith("tinker://")
