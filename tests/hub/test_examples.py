"""Every example as it stands, with what it names on a hub: planned for GPUs; and the two of TL;DR run, one after the
other."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.hub.conftest import CARD, EXAMPLES, AtHub, write_parquet

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hub.local_hub import LocalHub

pytestmark = pytest.mark.slow
CONFIGS = sorted([*EXAMPLES.glob("*.yaml"), *EXAMPLES.glob("agents/*.yaml")])
SHORT = ("gsm8k", "moe", "tldr_reward_model", "vision")
"""One of each sort."""
FROM_ROWS = ("deepspeed_sft.yaml", "tldr_reward_model.yaml")
LIBRARIES = {"openai_agents": "agents", "deepspeed": "deepspeed", "deepspeed_sft": "deepspeed", "lora": "peft",
             "lora_gsm8k": "peft", "reasoning_gym": "reasoning_gym", "frozen_lake": "gymnasium",
             "searcher": "rank_bm25"}  # fmt: skip
MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen2.5-7B-Instruct")
POSTS = [f"SUBREDDIT: r/pets\nPOST: my {n} cats sleep all day, and at night they do not.\nTL;DR:" for n in range(8)]
SUMMARIES = [f" {n} cats are awake at night." for n in range(8)]


@pytest.fixture
def whole_hub(hub: LocalHub, model_on_hub: Path, tmp_path: Path) -> LocalHub:
    """The hub with everything that examples name; the data sets of TL;DR have the columns of the true ones."""
    for name in MODELS:
        hub.add("models", name, model_on_hub)
    both = list(zip(POSTS, SUMMARIES, strict=True))
    tables = {
        "tldr": [{"prompt": post, "completion": summary} for post, summary in both],
        "tldr-preference": [{"prompt": post, "chosen": said, "rejected": " pets."} for post, said in both],
    }
    for name, rows in tables.items():
        folder = tmp_path / "on_hub" / name
        for split in ("train", "validation", "test"):
            write_parquet(folder / "main" / f"{split}-00000-of-00001.parquet", rows)
        (folder / "README.md").write_text(CARD)
        hub.add("datasets", f"trl-lib/{name}", folder)
    return hub


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.nightly] * (path.stem not in SHORT), id=path.stem) for path in CONFIGS],
)
def test_it_is_planned_for_gpus(path: Path, tmp_path: Path, whole_hub: LocalHub) -> None:
    """All but what needs them: whether SGLang and CUDA are there."""
    library = LIBRARIES.get(path.stem)
    if library is not None and importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    words = [str(EXAMPLES / "clusters/gpus.yaml"), f"inference_engine.program=[{sys.executable}]"]
    if path.name in FROM_ROWS:
        words = ["placement.training=[0]"]
    if path.name == "deepspeed_sft.yaml":
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1 + 1 = ", "completion": "2"}))
        words.append(f"dataset.paths=[{tmp_path}/rows.jsonl]")
    done = AtHub(tmp_path, whole_hub).areal("run", str(path), *words, "--dry-run", "--json")
    assert done.code == 0, done.err
    groups = {group["role"]: group for group in json.loads(done.out)["groups"]}
    assert groups["trainer"]["gpus"] == ([0] if path.name in FROM_ROWS else [1])
    if path.name not in FROM_ROWS:
        assert groups["server"]["gpus"] == [0]


@pytest.mark.parametrize(("engine", "gpus", "is_colocated"), [("sglang", "0", True), ("vllm", "0,1", False)])
def test_an_example_places_itself_on_the_gpus_of_the_machine(
    engine: str, gpus: str, is_colocated: bool, tmp_path: Path, whole_hub: LocalHub
) -> None:
    (tmp_path / "packages" / engine).mkdir(parents=True)
    place = AtHub(tmp_path, whole_hub)
    path = os.pathsep.join(filter(None, (f"{tmp_path}/packages", os.environ.get("PYTHONPATH"))))
    place.environment |= {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": path}
    words = ["placement.gpu_memory_gib=80", "--dry-run", "--json"]
    done = place.areal("run", str(EXAMPLES / "gsm8k.yaml"), *words)
    assert done.code == 0, done.err
    plan = json.loads(done.out)
    groups = {group["role"]: group for group in plan["groups"]}
    assert [groups[role]["gpus_each"] for role in ("trainer", "server")] == [1, 1]
    assert groups["server"]["shares_gpus"] is is_colocated
    assert ["note", f"inference_engine: auto is {engine}/{engine} on this machine"] in plan["rows"]


@pytest.mark.nightly
def test_tldr_runs_with_the_reward_model_that_it_has_trained(tmp_path: Path, whole_hub: LocalHub) -> None:
    place = AtHub(tmp_path, whole_hub)
    for name in ("tldr_reward_model.yaml", "tldr.yaml"):
        shutil.copy(EXAMPLES / name, tmp_path)
    small = ["steps=2", "model.dtype=float32", "rollout.batch_size=2"]

    too_early = place.areal("run", "tldr.yaml", *small, "sampling.max_new_tokens=8", "run_dir=early")
    assert too_early.code == 1
    assert "tldr_reward_model/model" in too_early.err

    done = place.areal("run", "tldr_reward_model.yaml", *small, "run_dir=tldr_reward_model")
    assert done.code == 0, done.err
    assert "train/accuracy" in place.metrics("tldr_reward_model")[-1]
    done = place.areal("run", "tldr.yaml", *small, "sampling.max_new_tokens=8", "rollout.group_size=2", "run_dir=run")
    assert done.code == 0, done.err
    scores = [line["reward/reward_model"] for line in place.metrics() if "reward/reward_model" in line]
    assert len(scores) == 2
    assert any(scores)
