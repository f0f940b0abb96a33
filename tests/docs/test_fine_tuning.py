"""The page "fine-tuning" says what works: its files are written out, its commands run, its promises are kept."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "fine-tuning.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r"```(?:python|yaml)\n# (my_\w+\.\w+)\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = PAGE.split("```sh\n")[1].split("```")[0].splitlines()
HANG_S = 600


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with every file of the page."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_the_page_works_as_written(folder: Path) -> None:
    configs = {f"my_{name}.yaml" for name in ("sft", "dpo", "kto", "reward_model", "ppo", "gkd")}
    assert set(FILES) == {*configs, "my_rows.py", "my_scores.py"}
    environment = {**os.environ, "AREAL_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    for command in COMMANDS:
        program, *words = shlex.split(command)
        start = {"python": [sys.executable], "areal": [sys.executable, "-m", "areal_core"]}[program]
        done = subprocess.run(
            [*start, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    polite, rude = (float(line.split()[0]) for line in done.stdout.splitlines())
    assert polite > rude
    audited = subprocess.run([sys.executable, "-m", "areal_core", "audit", "sft"], cwd=folder, check=False)
    assert audited.returncode == 0
    critic = metrics(folder / "ppo")
    assert [line["version"] for line in critic[:6]] == [0, 0, 0, 0, 1, 2]
    assert sum(line["reward/mean"] for line in critic[-4:]) > sum(line["reward/mean"] for line in critic[:4])
    supervised, preferred, scored = (metrics(folder / name) for name in ("sft", "dpo", "reward_model"))
    assert supervised[0]["train/negative_log_likelihood"] > 3.5
    assert supervised[-1]["train/negative_log_likelihood"] < 0.2
    assert preferred[0]["train/margin"] == pytest.approx(0, abs=1e-4)
    for lines in (preferred, scored):
        assert sum(line["train/accuracy"] for line in lines[-5:]) / 5 > 0.95
        assert lines[-1]["train/margin"] > lines[0]["train/margin"] + 0.5
        assert lines[-1]["batch/sequences"] == 2 * lines[-1]["batch/examples"] == 32
    labeled = metrics(folder / "kto")
    gaps = [line["train/desirable_reward"] - line["train/undesirable_reward"] for line in labeled]
    assert gaps[0] == pytest.approx(0, abs=1e-4)
    assert gaps[-1] > 0.5
    for name, drawn in (("sft", "train/loss"), ("dpo", "train/margin"), ("ppo", "train/critic/explained_variance")):
        assert f'"{drawn}":[' in (folder / name / "report.html").read_text()
    assert likelihoods(folder / "sft" / "model") < 2 < likelihoods(folder / "dpo" / "model")


def likelihoods(model: Path) -> float:
    """How much likelier a polite answer is than a rude one, as the logarithm of the ratio."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    asked = tokenizer("<user>how are you, ann?<assistant>", add_special_tokens=False)["input_ids"]
    found = []
    for answer in ("fine, thank you.<eos>", "go away.<eos>"):
        ids = torch.tensor([[*asked, *tokenizer(answer, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            table = torch.log_softmax(loaded(input_ids=ids).logits[0, :-1], -1)
        found.append(float(table.gather(1, ids[0, 1:, None])[len(asked) - 1 :].sum()))
    return found[0] - found[1]
