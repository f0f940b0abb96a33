"""A config of several files: each lies over those before it, and the command line over all."""

from __future__ import annotations


def test_further_files_lie_over_the_first_and_the_command_line_over_all(kit):
    kit.file("over.yaml", "steps: 7\ntrain_engine: {betas: [0.5, 0.6]}\ndataset: {count: 3}\n")
    kit.file("more.yaml", "steps: 8\n")
    words = ["dataset.count=4", "over.yaml", "more.yaml"]
    shown = "config.steps, config.dataset.settings.count, *config.train_engine.settings.betas"
    assert kit.shown(f"{shown}, resolved.name", *words) == "8 4 0.5 0.6 run"
    assert kit.shown("resolved.origins['steps']", *words) == "more.yaml:1"
    assert kit.areal("config", "show", "--plugins", "kit", "run.yaml", *words).code == 0


def test_plugins_of_a_further_file_are_added(kit):
    kit.plugin("mine")
    kit.file("over.yaml", "plugins: [mine]\n")
    assert kit.shown("resolved.plugins.names", "over.yaml", plugins=["kit"]) == "['kit', 'mine']"


def test_a_further_file_that_is_not_there_is_told(kit):
    kit.file("over.yaml", "steps: 7\n")
    assert "there is no config file over.yml\n  did you mean over.yaml?" in kit.resolve("over.yml", plugins=["kit"])


def test_paths_of_a_further_file_begin_where_those_of_the_first_do(kit):
    """Those of components as those of data: one folder for a run."""
    kit.file("parts.py", "def score(completion): return 1.0\n")
    kit.file("below/over.yaml", "rewards: [parts.py:score]\n")
    assert kit.shown("config.rewards[0].target", "below/over.yaml") == str(kit.work / "parts.py:score")


def test_a_preset_of_a_further_file_lies_below_all(kit):
    kit.file("over.yaml", "preset: nonsense/none\n")
    assert "nonsense" in kit.resolve("over.yaml", plugins=["kit"])
