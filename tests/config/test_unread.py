"""Components of the user's own are found without an import; their settings stay unread until they are asked for."""

from __future__ import annotations

import sys

import pytest

from areal_core.config import load_run, resolve
from areal_core.config.imports import find_reference
from areal_core.config.problems import RejectedError
from areal_core.config.selection import NotReadError, leaving_unread, selections
from areal_core.errors import ConfigError, PluginMissingError

MINE = """\
from areal_core.config import Selection, Settings, component
def reward(completion, *, scale: float = 1.0): return scale
def plain(batch): return batch["reward"]
def loss(terms): return -terms.logprobs, {}
class Rows:
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": "a"}
class Workflow:
    class Config(Settings):
        limit: int = 3
        reward: Selection = component("reward_functions", default="mine.py:reward")
class Engine:
    def __init__(self, **settings): pass
"""
CONFIG = """\
steps: 1
model: {path: tiny}
dataset: mine.py:Rows
train_engine: engine.py:Engine
algorithm: {type: policy_gradient, advantage: mine.py:plain, policy_loss: mine.py:loss}
workflow: {type: mine.py:Workflow, reward: mine.py:reward}
rewards: [{type: mine.py:reward, scale: "2"}]
inference_engine: engine.py:Engine
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    task = tmp_path / "task"
    task.mkdir()
    for name, text in {"mine.py": MINE, "engine.py": MINE, "run.yaml": CONFIG}.items():
        (task / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return task


def is_imported(folder, name="mine"):
    return any(module.endswith(f".{name}") for module in sys.modules if str(folder) in module)


def test_reading_a_config_imports_engines_alone(folder):
    resolved = resolve(folder / "run.yaml")
    (folder / "config.yaml").write_text(resolved.to_yaml())
    resolve(folder / "config.yaml")
    load_run(folder)
    assert not is_imported(folder)
    assert is_imported(folder, "engine"), "the driver places its processes"
    assert {*resolved.files} == {f"{folder}/mine.py", f"{folder}/engine.py"}
    resolve(folder / "run.yaml", imports=True)
    assert is_imported(folder)


def test_settings_are_read_when_they_are_asked_for(folder):
    config = resolve(folder / "run.yaml").config
    with leaving_unread():
        with pytest.raises(NotReadError, match=r"the settings of reward function '.*mine\.py:reward' are unread"):
            _ = config.rewards[0].settings
        assert ("workflow", "reward") not in [path for path, _ in selections(config)]
    assert config.rewards[0].settings == {"scale": 2.0}
    assert config.workflow.settings.limit == 3
    assert ("workflow", "reward") in [path for path, _ in selections(config)]
    assert config.rewards[0].build()(completion="") == 2.0


def test_wrong_settings_are_reported_by_who_asks_for_them(folder):
    (chosen,) = resolve(folder / "run.yaml", [], ["rewards=[{type: task/mine.py:reward, scael: 2}]"]).config.rewards
    with pytest.raises(ConfigError) as refusal:
        chosen.build()
    assert refusal.value.message == f"reward function '{folder}/mine.py:reward': scael: unknown key"
    assert refusal.value.hints[0] == "did you mean 'scale'?"


def test_a_plugin_that_is_missing_below_unread_settings_is_reported_with_its_repair(folder):
    words = ["workflow={type: task/mine.py:Workflow, reward: nowhere/exact}"]
    config = resolve(folder / "run.yaml", [], words).config
    with pytest.raises(PluginMissingError, match="no plugin named 'nowhere' is installed") as refusal:
        config.workflow.build()
    assert "install its distribution" in refusal.value.hints[0]


def test_unread_settings_mean_the_same_beside_any_config(folder, tmp_path):
    """A file in an override is relative to the current folder, and one in the config to that."""
    (tmp_path / "here.py").write_text(MINE)
    words = ["workflow={type: task/mine.py:Workflow, reward: here.py:reward, other: [task/mine.py:loss, no.py:f]}"]
    written = resolve(folder / "run.yaml", [], words).to_tree()["workflow"]
    assert written == {
        "type": f"{folder}/mine.py:Workflow",
        "reward": f"{tmp_path}/here.py:reward",
        "other": [f"{folder}/mine.py:loss", "no.py:f"],
    }
    config = resolve(folder / "run.yaml", [], words[0].replace(", other", "} #").split("\n")).config
    assert config.workflow.settings.reward.target == f"{tmp_path}/here.py:reward"


def test_checks_that_need_unread_settings_are_left_to_the_child(folder):
    words = ["rollout.group_size=1", "training.num_minibatches=3"]
    (folder / "mine.py").write_text(f"{MINE}plain.needs_group = True\n")
    with pytest.raises(ConfigError) as refusal:
        resolve(folder / "run.yaml", [], words)
    assert len(refusal.value.problems) == 1, "what the driver can know is reported at once"
    resolve(folder / "run.yaml", [], words[:1])
    with pytest.raises(ConfigError, match="compares the answers to one prompt"):
        resolve(folder / "run.yaml", [], words[:1], imports=True)


@pytest.mark.parametrize(
    "code",
    [
        "def x(): ...",
        "async def x(): ...",
        "class x: ...",
        "x = 1",
        "x: int = 1",
        "a, (x, *b) = f",
        "import x",
        "import x.y",
        "from a import b as x",
        "if y:\n    def x(): ...\nelse:\n    x = None",
        "try:\n    import fast as x\nexcept ImportError:\n    x = 1",
        "for x in y: ...",
        "with y as x: ...",
        "(x := 3)",
        "def f():\n    global x\n    x = 1",
        "match y:\n    case [x]: ...",
        "from a import *",
        "def __getattr__(name): ...",
        "globals()['x'] = 1",
        "import sys\nsetattr(sys.modules[__name__], 'x', 1)",
        "this is no Python",
    ],
)
def test_a_file_that_may_define_a_name_is_accepted(tmp_path, code):
    (tmp_path / "mine.py").write_text(code)
    assert find_reference("mine.py:x", tmp_path).target == f"{tmp_path}/mine.py:x"


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        ("def xs(): ...\ny = 1", "did you mean 'xs'?"),
        ("def f():\n    x = 1\nclass C:\n    x = 1\n", "it has: C, f"),
        ("_x = lambda x: x", "it has: nothing that can be called"),
    ],
)
def test_a_name_that_a_file_does_not_define_is_refused_without_an_import(tmp_path, code, hint):
    (tmp_path / "mine.py").write_text(code)
    with pytest.raises(RejectedError) as refusal:
        find_reference("mine.py:x", tmp_path)
    (problem,) = refusal.value.problems
    assert (problem.message, problem.hints) == (f"{tmp_path}/mine.py has no 'x'", (hint,))
