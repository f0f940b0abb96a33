"""Algorithms of a third party, each in one short file: with a critic, from pairs, from a teacher."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow
METADATA = "Metadata-Version: 2.1\nName: areal-homemade\nVersion: 0.1.0\nRequires-Dist: areal-core>=0.1\n"
SOURCE = Path(__file__).parents[2] / "examples" / "algorithms"
ROWS = [{"prompt": f"{n}+{n}=", "chosen": str(2 * n), "rejected": str(n)} for n in range(10, 40)]


@pytest.fixture
def homemade(workplace: Workplace) -> Workplace:
    """The workplace with the distribution installed beside it."""
    site = workplace.folder / "site"
    shutil.copytree(SOURCE / "src" / "areal_homemade", site / "areal_homemade")
    note = site / "areal_homemade-0.1.0.dist-info"
    note.mkdir()
    (note / "METADATA").write_text(METADATA)
    (note / "entry_points.txt").write_text("[areal.plugins]\nhomemade = areal_homemade.plugin\n")
    paths = [str(site), os.environ.get("PYTHONPATH", "")]
    workplace.environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return workplace


def test_its_own_tests_pass(homemade: Workplace) -> None:
    shutil.copytree(SOURCE / "tests", homemade.folder / "tests")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=homemade.folder, env=homemade.environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.nightly
def test_a_critic_warms_up_and_learns_beside_the_policy(homemade: Workplace) -> None:
    words = ["algorithm=homemade/ppo", "algorithm.warmup_steps=2", "roles.critic.learning_rate=1e-3", "steps=4"]
    words += ["train_engine.schedule=linear", "launcher.trainer_processes=2"]
    done = homemade.areal("run", "run.yaml", "run_dir=run", "--plugins", "homemade", *words, "checkpoint.every=3")
    assert done.code == 0, done.err
    lines = homemade.metrics()
    assert [line["version"] for line in lines] == [0, 0, 1, 2], "nothing is synced while only the critic learns"
    for line in lines:
        assert {"train/critic/error", "train/critic/gradient_norm", "train/distance"} <= line.keys()
    assert [("train/loss" in line) for line in lines] == [False, False, True, True]
    rates = [line["train/learning_rate"] for line in lines[2:]]
    assert rates[1] == pytest.approx(rates[0] / 2), "the policy has two updates, over which its rate decays"
    assert lines[3]["train/critic/learning_rate"] == pytest.approx(1e-3 / 4)
    (checkpoint, *_) = sorted((homemade.folder / "run").glob("attempts/*/checkpoints/step-*"))
    assert {"actor", "critic"} <= {path.name for path in checkpoint.iterdir()}
    more = homemade.areal("run", "--resume", "run", "steps=5", "--allow-changes")
    assert more.code == 0, more.err
    assert homemade.areal("audit", "run").code == 0


@pytest.mark.nightly
def test_preferences_are_learned_from_a_file(homemade: Workplace) -> None:
    rows = homemade.folder / "pairs.jsonl"
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    (homemade.folder / "dpo.yaml").write_text("""
plugins: [fsdp, rewards, homemade]
steps: 12
model: {path: model}
dataset: {type: rewards/jsonl, paths: [pairs.jsonl]}
rollout: {batch_size: 8}
training: {num_minibatches: 2}
train_engine: {type: fsdp, learning_rate: 3e-3}
algorithm: homemade/dpo
""")
    done = homemade.areal("run", "dpo.yaml", "run_dir=run")
    assert done.code == 0, done.err
    lines = homemade.metrics()
    assert lines[0]["batch/examples"] == 8
    assert lines[0]["batch/sequences"] == 16
    assert lines[-1]["train/margin"] > lines[0]["train/margin"] + 0.1
    assert lines[-1]["train/accuracy"] > 0.9


@pytest.mark.nightly
def test_a_teacher_is_asked_about_every_token(homemade: Workplace) -> None:
    words = ["algorithm=homemade/distill", "roles.teacher.path=model", "rewards=[parts.py:digits]", "steps=2"]
    done = homemade.areal("run", "run.yaml", "run_dir=run", "--plugins", "homemade", *words)
    assert done.code == 0, done.err
    assert homemade.metrics()[0]["train/gradient_norm"] == pytest.approx(0, abs=1e-6), "at first they are the same"
    wrong = homemade.areal("config", "check", "run.yaml", "--plugins", "homemade", words[0], "roles.techer.path=x")
    assert "roles of this algorithm: actor, teacher" in wrong.err
