"""A script of TRL with one changed import."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from areal_core import open_run

if TYPE_CHECKING:
    from conftest import Workplace

SCRIPT = """
from {source} import GRPOConfig, GRPOTrainer

# As GSM8K's rows are: a question, and an answer with its steps.
dataset = [
    {{"prompt": [{{"role": "user", "content": f"{{a}}+{{b}}="}}], "answer": f"{{a}} and {{b}} #### {{a + b}}"}}
    for a in range(10) for b in range(10)
]

def digits(completions, answer, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    assert all(text.split("#### ")[1].isdigit() for text in answer)
    return [sum(character.isdigit() for character in text) / 8 for text in texts]

trainer = GRPOTrainer(
    model="model",
    reward_funcs=digits,
    args=GRPOConfig(
        output_dir="out", learning_rate=1e-2, max_steps=12, per_device_train_batch_size=32, max_completion_length=8,
        bf16=False, gradient_checkpointing=False, logging_steps=1,
    ),
    train_dataset=dataset,
)
trainer.train()
trainer.save_model()
for entry in trainer.state.log_history:
    print("step", entry["step"], "reward", entry.get("reward"), "loss", entry["loss"])
"""


@pytest.mark.slow
def test_a_script_of_trl_runs_and_learns(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(SCRIPT.format(source="areal_core.trl"))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=workplace.folder, env=workplace.environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rewards = [float(found) for found in re.findall(r"step \d+ reward ([\d.]+) loss", done.stdout)]
    assert len(rewards) == 12
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards
    run = open_run(next((workplace.folder / "out").glob("run-*")))
    assert set(run.metrics["staleness/max"]) == {0}, "TRL is synchronous"
    assert "reward/digits" in run.metrics.columns
    assert (workplace.folder / "out" / "model.safetensors").read_bytes() == (
        run.model / "model.safetensors"
    ).read_bytes()
