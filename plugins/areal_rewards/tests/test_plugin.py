"""The records lead to what exists, configs need no torch, and mistakes are found before anything starts."""

import json
from pathlib import Path

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_testing.conformance import PluginSuite

PARTS = "class Engine:\n    def __init__(self): ...\ndef loss(): ...\n"
RUN = """
plugins: [rewards]
steps: 1
model: {path: tiny}
dataset: {type: rewards/jsonl, paths: [data/rows.jsonl]}
workflow: single_turn
rewards: [rewards/exact_match]
inference_engine: parts.py:Engine
train_engine: parts.py:Engine
algorithm: parts.py:loss
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that resolves a config, which lies in another folder than the current one, with these overrides."""
    folder = tmp_path / "configs"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "rows.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}))
    (folder / "parts.py").write_text(PARTS)
    (folder / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return lambda *overrides: resolve("configs/run.yaml", overrides=overrides, environment={})


class TestPlugin(PluginSuite):
    plugin = "rewards"
    heavy = ("torch", "transformers", "datasets", "math_verify", "reasoning_gym", "aiohttp")


def test_paths_are_relative_to_the_config_and_stay_right_in_the_run_folder(read, tmp_path, monkeypatch):
    resolved = read()
    assert resolved.config.dataset.build()[0] == {"prompt": "1+1=", "answer": "2"}
    run = tmp_path / "elsewhere" / "run"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(resolved.to_yaml())
    monkeypatch.chdir(run)
    from areal_core.config import load_run

    again = load_run(Path(run)).config
    assert again.dataset.settings.paths == [tmp_path / "configs" / "data" / "rows.jsonl"]
    assert again.dataset.build()[0]["answer"] == "2"


def test_a_reward_has_its_settings_bound(read):
    resolved = read("rewards=[{type: exact_match, after: '='}, {type: format, pattern: '[0-9]+'}]")
    exact, form = (chosen.build() for chosen in resolved.config.rewards)
    assert exact("1+1=2", "2") == 1
    assert form("23") == 1


@pytest.mark.parametrize(
    ("module", "override", "extra"),
    [
        ("math_verify", "rewards=[math_verify]", "math"),
        ("reasoning_gym", "rewards=[rewards/reasoning_gym]", "reasoning-gym"),
        ("reasoning_gym", "dataset={type: rewards/reasoning_gym, task: chain_sum}", "reasoning-gym"),
        ("datasets", "dataset={type: hub, name: openai/gsm8k}", "datasets"),
        ("datasets", "dataset={type: files, paths: [rows.parquet]}", "datasets"),
    ],
)
def test_a_missing_library_is_told_before_anything_starts(module, override, extra, read, without):
    without(module)
    with pytest.raises(ConfigError) as caught:
        read(override)
    assert f"pip install './plugins/areal_rewards[{extra}]'" in str(caught.value)


def test_a_length_penalty_that_nothing_reaches_is_refused(read):
    with pytest.raises(
        ConfigError, match=r"starts at 300 tokens, which no completion exceeds: sampling\.max_new_tokens is 256"
    ):
        read("rewards=[{type: length_penalty, longest: 400, margin: 100}]")
    read("rewards=[{type: length_penalty, longest: 256, margin: 100}]")
