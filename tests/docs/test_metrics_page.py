"""docs/reference/metrics.yaml explains every metric: those that the code makes, and those of a recorded run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

from areal_core.metric_names import is_own

ROOT = Path(__file__).parents[2]
WORDS = yaml.safe_load((ROOT / "docs" / "reference" / "metrics.yaml").read_text(encoding="utf-8"))
ROWS = {names: cells for group in WORDS["groups"] for names, cells in group["metrics"].items()}
EXPLAINED = {name for names in ROWS for name in names.split()}
GROUPS = (
    "batch", "episodes", "evaluation", "groups", "sync", "reward", "servers", "staleness", "time", "logprob_check",
)  # fmt: skip
MADE = re.compile(rf'"((?:{"|".join(GROUPS)})/\w+)"')
RECORDED = [
    "step",
    "time",
    "version",
    "batch/response_length",
    "batch/sampled_tokens",
    "batch/sequences",
    "batch/tokens",
    "batch/truncated",
    "evaluation/episodes",
    "evaluation/failed",
    "evaluation/response_length",
    "evaluation/reward",
    "evaluation/reward/right_result",
    "evaluation/reward/shows_working",
    "groups/failed",
    "reward/all_episodes",
    "reward/groups_all_equal",
    "reward/mean",
    "reward/right_result",
    "reward/shows_working",
    "reward/std",
    "staleness/max",
    "staleness/mean",
    "staleness/share_0",
    "staleness/share_1",
    "staleness/tokens_over_bound",
    "time/checkpoint_s",
    "time/evaluate_s",
    "time/weight_sync_s",
    "time/step_s",
    "time/train_s",
    "time/logprob_check_s",
    "time/wait_for_rollouts_s",
    "time/wait_s",
    "train/behavior_difference",
    "train/behavior_kl",
    "train/behavior_weight",
    "train/clip_fraction",
    "train/entropy",
    "train/gradient_norm",
    "train/learning_rate",
    "train/logprob",
    "train/loss",
    "train/ratio",
    "train/skipped",
    "train/truncated_fraction",
    "logprob_check/difference_max",
    "logprob_check/difference_mean",
    "logprob_check/difference_clipped",
    "logprob_check/difference_p99",
]
"""Of a run of the preset `grpo/addition`, all its lines together."""


COLUMNS = {"advantages", "proximal_share", "pair_weights"}
"""What the composition, or an algorithm of pairs, adds to a batch; no metrics."""


def sources(*folders: str) -> list[str]:
    """The text of every Python file below these folders."""
    return [path.read_text(encoding="utf-8") for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def words_of_dictionaries(text: str) -> set[str]:
    """Keys of the dictionaries that a file writes out, and those that it sets in one by name."""
    nodes = list(ast.walk(ast.parse(text)))
    keys = [key for node in nodes if isinstance(node, ast.Dict) for key in node.keys]
    keys += [node.slice for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store)]
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


def made() -> set[str]:
    """The metrics that the code makes, but for those whose names it composes when it runs."""
    texts = sources("areal_core/rollout", "areal_core/training", "areal_core/inference")
    keys = {key for text in texts for key in MADE.findall(text)}
    keys |= {f"time/{name}_s" for text in texts for name in re.findall(r'self\._phase\("(\w+)"\)', text)}
    keys |= {f"groups/{reason}" for text in texts for reason in re.findall(r'_leave\([^,]+, "(\w+)"\)', text)}
    parts = sources("areal_core/algorithms")
    grpo = ROOT / "plugins/areal_grpo/src/areal_grpo"
    losses = ("losses", "sequence_losses", "weighted_losses", "ratios")
    names = (*losses, "corrections", "sequence_corrections", "regularizers")
    parts += [(grpo / f"{name}.py").read_text() for name in names]
    finetuning = ROOT / "plugins/areal_finetuning/src/areal_finetuning"
    names = ("supervised", "pairs", "preferences", "distillation")
    parts += [(finetuning / f"{name}.py").read_text() for name in names]
    keys |= {f"train/{name}" for text in parts for name in words_of_dictionaries(text) - COLUMNS}
    keys |= {f"train/{name}" for text in parts for name in re.findall(r'_dropped\(.*"(\w+)"\)', text)}
    keys |= {f"train/critic/{name}" for name in words_of_dictionaries((grpo / "auxiliary_losses.py").read_text())}
    stages = [path.read_text() for path in grpo.glob("*transforms.py")]
    keys |= {f"train/{name}" for text in stages for name in re.findall(r'context\.log\("(\w+)"', text)}
    meter = (ROOT / "plugins/areal_fsdp/src/areal_fsdp/planning/meter.py").read_text().partition("def take")[2]
    keys |= {f"engine/{name}" for name in re.findall(r'"(\w+)":', meter)}
    engine = (ROOT / "plugins/areal_fsdp/src/areal_fsdp/role_engine.py").read_text()
    keys |= {
        f"train/{name}" for call in re.findall(r"\bmeans\((.*?)\)", engine) for name in re.findall(r"(\w+)=", call)
    }
    return keys


def is_explained(key: str) -> bool:
    """Whether the page has a row for a metric, be it one for all metrics of a kind."""
    return re.sub(r"share_\d+$", "share_N", re.sub("right_result|shows_working", "NAME", key)) in EXPLAINED


@pytest.mark.parametrize("key", RECORDED)
def test_a_metric_of_a_recorded_run_is_explained(key: str) -> None:
    assert is_explained(key), f"docs/reference/metrics.yaml has no row for {key}"


def test_a_row_has_a_unit_a_meaning_and_perhaps_a_worry() -> None:
    assert [names for names, cells in ROWS.items() if not 2 <= len(cells) <= 3 or not cells[1]] == []


def test_the_metrics_that_the_code_makes_are_explained() -> None:
    keys = made()
    assert {"groups/stale", "time/sleep_s", "train/dual_clip_fraction", "train/loss", "servers/ready"} <= keys
    assert {"train/vetoed_fraction", "train/clip_fraction_negative"} <= keys
    assert sorted(key for key in keys if not is_explained(key)) == []


def test_no_workflow_may_use_the_names_of_the_page_except_those_that_workflows_log() -> None:
    names = {name.removeprefix("evaluation/") for name in EXPLAINED} | {*EXPLAINED}
    assert {name.partition("/")[0] for name in names if not is_own(name)} == {"agents"}
