"""The settings of the user's own components: who imports the code, how often, and what the driver learns of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from areal_core.checks.models import StoredModels
from areal_core.checks.preflight import preflight
from areal_core.checks.reading import read_settings
from areal_core.checks.reward_imports import import_problems, start_importing_rewards
from areal_core.config import load_run, resolve, roles_of
from areal_core.config.selection import unread_selections
from areal_core.errors import ConfigError
from areal_core.runtime.folder import RunFolder
from areal_core.runtime.process_tree import children

ENGINE = """\
class Engine:
    from areal_testing.fakes import FakeEngine
    capabilities = FakeEngine.capabilities
    def __init__(self, **settings): pass
class Trainer: pass
"""
MINE = """\
import json, os, sys
from pathlib import Path
from typing import ClassVar
from pydantic import Field
from areal_core.config import LocalPath, Selection, Settings, component

here = Path(__file__).parent
with (here / "imports").open("a") as imports:
    imports.write(json.dumps([os.getpid(), "MY_TOKEN" in os.environ]) + "\\n")
LIMIT = json.loads((here / "limit").read_text())

def reward(completion, *, scale: float = 1.0): return scale
def plain(batch): return batch["reward"]
def loss(terms): return -terms.logprobs, {}
class Source:
    def prepare(self, cache): raise AssertionError("no model is made")
class Rows:
    def __len__(self): return 1
    def __getitem__(self, index): return {"prompt": "a"}
class Workflow:
    class Config(Settings):
        scores_answers: ClassVar[bool] = True
        max_tokens: int = Field(default=LIMIT, le=LIMIT)
        table: LocalPath = Path("table.json")
        reward: Selection = component("reward_functions", default="mine.py:reward")
    def __init__(self, settings): self.settings = settings
    async def run_episode(self, row, context): ...
"""
CONFIG = """\
steps: 1
model: {source: mine.py:Source}
dataset: mine.py:Rows
train_engine: engine.py:Trainer
algorithm: {type: policy_gradient, advantage: mine.py:plain, policy_loss: mine.py:loss}
workflow: {type: mine.py:Workflow, max_tokens: "7"}
rewards:
  - {type: mine.py:reward, scale: "2"}
inference_engine: engine.py:Engine
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config, components beside it, and a cache of its own."""
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    task = tmp_path / "task"
    task.mkdir()
    for name, text in {"mine.py": MINE, "engine.py": ENGINE, "run.yaml": CONFIG, "limit": "9", "imports": ""}.items():
        (task / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return task


def importers(folder):
    """The processes that have imported the components since this was last asked."""
    file = folder / "imports"
    lines = file.read_text().splitlines()
    file.write_text("")
    return [json.loads(line)[0] for line in lines]


def is_imported(folder):
    """Whether this process has imported the components."""
    return any(name.endswith(".mine") for name in sys.modules if str(folder) in name)


def test_one_child_imports_the_code_and_only_while_something_has_changed(folder):
    def check():
        assert read_settings(resolve(folder / "run.yaml")) == []
        return len(importers(folder))

    assert [check(), check(), check()] == [1, 0, 0]
    (stored,) = (folder.parent / "cache" / "checked" / "settings").iterdir()
    assert stored.stat().st_mode & 0o777 == 0o600, "it has settings of the user's"
    (folder / ".cache_of_a_linter").mkdir()  # no import looks into it
    assert check() == 0
    (folder / "limit").write_text("8")  # a file that the code reads
    assert [check(), check()] == [1, 0]
    (folder / "mine.py").write_text(MINE + "\n")
    assert [check(), check()] == [1, 0]
    (folder / "json.py").write_text("from areal_core import json_of_somebody")  # Python's own comes first
    (folder / "areal.py").write_text("")  # beside the code, so it may be imported by it now
    assert [check(), check()] == [1, 0]
    assert not is_imported(folder)


def test_the_driver_adopts_what_the_child_has_read(folder):
    resolved = resolve(folder / "run.yaml")
    assert [path for path, _ in unread_selections(resolved.config)] == [
        ("model", "source"),
        ("dataset",),
        ("workflow",),
        ("rewards", 0),
        ("algorithm", "advantage"),
        ("algorithm", "policy_loss"),
    ]
    read_settings(resolved)
    assert unread_selections(resolved.config) == []
    assert os.getpid() not in importers(folder)
    workflow = resolved.config.workflow.settings
    assert (workflow.max_tokens, workflow.scores_answers, getattr(workflow, "other", None)) == (7, True, None)
    tree = resolved.to_tree()
    assert tree["workflow"] == {
        "type": f"{folder}/mine.py:Workflow",
        "max_tokens": 7,
        "table": str(folder / "table.json"),
        "reward": {"type": f"{folder}/mine.py:reward"},
    }
    assert tree["rewards"] == [{"type": f"{folder}/mine.py:reward", "name": None, "weight": 1.0, "scale": 2.0}]
    assert list(roles_of(resolved.config.algorithm, 1)) == ["actor"]
    assert resolved.config.workflow.build().settings.max_tokens == 7, "who builds it imports it"
    assert importers(folder) == [os.getpid()]


@pytest.mark.slow
def test_needs_of_ones_own_code_reach_the_driver(folder):
    code = "from areal_core.interfaces import Role\nplain.needs = lambda updates: [Role('judge', needs_path=True)]\n"
    (folder / "mine.py").write_text(MINE + code)
    with pytest.raises(ConfigError, match=r"roles\.judge\.path: is required"):
        read_settings(resolve(folder / "run.yaml"))
    resolved = resolve(folder / "run.yaml", [], ["roles.judge.path=there"])
    read_settings(resolved)
    needed = roles_of(resolved.config.algorithm, 1)
    assert [(role.name, role.needs_path) for role in needed.values()] == [("actor", False), ("judge", True)]
    assert not is_imported(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("workflow: {type: mine.py:Workflow, max_tokenz: 7}", "workflow.max_tokenz: unknown key"),
        ("workflow: {type: mine.py:Workflow, max_tokens: 10}", "workflow.max_tokens: must be less than or equal to 9"),
        ("workflow: {type: mine.py:Workflow, reward: nix.py:f}", "workflow.reward.type: cannot read "),
        ("rewards: [{type: mine.py:reward, scael: 2}]", "rewards.0.scael: unknown key"),
    ],
)
def test_problems_that_the_child_finds_have_their_line(folder, line, problem):
    key = line.partition(":")[0]
    lines = [text for text in CONFIG.splitlines() if not text.startswith((key, " "))]
    (folder / "run.yaml").write_text("\n".join([*lines, line]))
    with pytest.raises(ConfigError) as refusal:
        read_settings(resolve(folder / "run.yaml"))
    assert refusal.value.message.startswith(f"{folder}/run.yaml:{len(lines) + 1}: {problem}")
    assert not is_imported(folder)


@pytest.mark.slow
def test_a_child_that_dies_is_a_problem_with_its_last_line(folder):
    (folder / "mine.py").write_text("import os\nprint('the last words', flush=True)\nos._exit(3)\nfrom x import *")
    with pytest.raises(ConfigError) as refusal:
        read_settings(resolve(folder / "run.yaml"))
    assert "ended with exit code 3: the last words" in str(refusal.value)


def test_the_text_for_other_processes_has_infinity(folder):
    resolved = resolve(folder / "run.yaml", [], ["rewards.0.scale=.inf"])
    assert "scale: .inf" in resolved.to_yaml()


@pytest.mark.slow
def test_infinity_stays_infinity_from_the_child_and_from_the_cache(folder):
    for importing in (1, 0):
        resolved = resolve(folder / "run.yaml", [], ["rewards.0.scale=.inf"])
        read_settings(resolved)
        assert len(importers(folder)) == importing
        assert resolved.config.rewards[0].settings == {"scale": float("inf")}


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import socket\ntry: socket.create_connection(('127.0.0.1', 9), 0.1)\nexcept OSError: pass\n",
        "import subprocess\nsubprocess.run(['true'])\n",
        "import sqlite3\nsqlite3.connect(':memory:')\n",
    ],
    ids=["server", "program", "database"],
)
def test_a_result_that_came_from_elsewhere_is_not_stored(folder, code):
    (folder / "mine.py").write_text(code + MINE)
    for _ in range(2):
        read_settings(resolve(folder / "run.yaml"))
        assert len(importers(folder)) == 1


def test_the_child_checks_the_model_with_settings_that_the_driver_does_not_have(folder):
    code = """
Workflow.Config.check_model = lambda self, config, model: [f"is not for {model.description['model_type']}"]
"""
    (folder / "mine.py").write_text(MINE + code)
    config = CONFIG.replace("{source: mine.py:Source}", "{path: ../model}")
    (folder / "run.yaml").write_text(config)
    model = folder.parent / "model"
    model.mkdir()
    save_file({"weight": np.zeros(1, np.float32)}, model / "model.safetensors")
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    problem = "workflow: is not for qwen3"
    assert read_settings(resolve(folder / "run.yaml")) == [], "only `areal config check` asks"
    for _ in range(2):  # the second time from the cache
        with pytest.raises(ConfigError) as caught:
            read_settings(resolve(folder / "run.yaml"), checks_models=True)
        assert list(caught.value.problems) == [problem]
    assert len(importers(folder)) == 1
    (model / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="is not for llama"):
        read_settings(resolve(folder / "run.yaml"), checks_models=True)


def test_a_new_terminal_changes_nothing(folder, monkeypatch):
    read_settings(resolve(folder / "run.yaml"))
    for name in ("SHLVL", "_", "WINDOWID", "TERM_SESSION_ID", "SSH_TTY"):
        monkeypatch.setenv(name, "other")
    read_settings(resolve(folder / "run.yaml"))
    assert len(importers(folder)) == 1
    monkeypatch.setenv("MY_OWN", "other")
    read_settings(resolve(folder / "run.yaml"))
    assert len(importers(folder)) == 1


def load_folder(folder):
    """The config as a child reads it."""
    (folder / "config.yaml").write_text(resolve(folder / "run.yaml").to_yaml())
    return load_run(folder)


def test_rewards_are_imported_without_secrets_as_in_a_run(folder, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "x")
    (folder / "mine.py").write_text("import os\nos.environ['MY_TOKEN']\n" + MINE)
    unread = load_folder(folder)
    text = (folder / "config.yaml").read_text()
    (problem,) = import_problems(start_importing_rewards(unread.config, text))
    assert problem.startswith(f"rewards.0: importing {folder}/mine.py raises KeyError: 'MY_TOKEN' (mine.py:2): ")
    assert problem.endswith("name it in the config, in a setting of the reward: env:NAME")
    assert import_problems(start_importing_rewards(unread.config, f"{text}# env:MY_TOKEN")) == []
    assert not is_imported(folder)


@pytest.mark.slow
def test_a_preflight_imports_the_code_in_its_child_alone(folder, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "x")
    resolved = resolve(folder / "run.yaml")
    preflight(resolved, RunFolder(folder / "run"), [], starts=False)
    lines = [json.loads(line) for line in (folder / "imports").read_text().splitlines()]
    assert sorted(has_token for _, has_token in lines) == [False, True], "the child, and its process for rewards"
    assert os.getpid() not in importers(folder)
    assert resolved.config.rewards[0].settings == {"scale": 2.0}
    assert not is_imported(folder)
    (folder / "mine.py").write_text("import os\nos.environ['MY_TOKEN']\n" + MINE)
    with pytest.raises(ConfigError, match=r"rewards\.0: importing .* raises KeyError: 'MY_TOKEN'"):
        preflight(resolve(folder / "run.yaml"), RunFolder(folder / "run"), [], starts=False)


@pytest.mark.slow
def test_a_wrong_setting_is_reported_before_a_model_is_downloaded(folder, monkeypatch):
    monkeypatch.setattr(StoredModels, "_read", lambda *_: pytest.fail("a model is asked for"))
    words = ["model.source=null", "model.path=somebody/model", "rewards=[{type: task/mine.py:reward, scael: 2}]"]
    with pytest.raises(ConfigError, match=r"command line: rewards\.0\.scael: unknown key"):
        preflight(resolve(folder / "run.yaml", [], words), RunFolder(folder / "run"), [], starts=True)


@pytest.mark.slow
def test_settings_that_became_wrong_after_they_were_read_are_reported_as_such(folder):
    resolved = resolve(folder / "run.yaml")
    read_settings(resolved)
    (folder / "limit").write_text("5")
    with pytest.raises(ConfigError, match=r"workflow\.max_tokens: must be less than or equal to 5"):
        preflight(resolved, RunFolder(folder / "run"), [], starts=False)


def test_a_child_ends_with_its_driver(tmp_path):
    """A driver that is killed leaves neither the child nor its folder, whatever the child is busy with."""
    started = tmp_path / "started"
    slow = f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(900)"
    (tmp_path / "busy.py").write_text(
        f"import sys\nfrom areal_core.checks.reading import start_child\nstart_child(sys.argv[1:])\n{slow}\n"
    )
    program = "from areal_core.checks.reading import Child; child = Child('busy', '')\n"
    program += "print(child.folder, flush=True); child.wait()"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}",
        "TMPDIR": str(tmp_path),
    }
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True
    ) as driver:
        assert driver.stdout is not None
        folder = Path(driver.stdout.readline().strip())
        wait_until(started.exists)
        (child,) = children(driver.pid)
        assert folder.is_dir()
        driver.kill()
    wait_until(lambda: not Path(f"/proc/{child}").exists())
    assert not folder.exists()


def wait_until(is_true):
    for _ in range(6000):
        if is_true():
            return
        time.sleep(0.05)
    raise AssertionError("waited for five minutes")
