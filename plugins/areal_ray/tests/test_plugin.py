"""The records lead to what exists; settings say what cannot be; a missing library is told. No Ray is started here."""

import importlib.util
import sys
import threading
import time

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError, UsageError
from areal_core.testing.conformance import PluginSuite
from areal_ray.actor import WardenActor
from areal_ray.command import main
from areal_ray.config import RaySettings

PARTS = """
class Part:
    def __init__(self): ...
"""
RUN = """
plugins: [ray]
steps: 1
model: {path: tiny}
dataset: parts.py:Part
workflow: single_turn
inference_engine: parts.py:Part
train_engine: parts.py:Part
algorithm: parts.py:Part
launcher: {type: ray}
"""


class TestPlugin(PluginSuite):
    plugin = "ray"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def without_ray(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "ray" else find(name, *rest))


@pytest.fixture
def with_ray(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: find("json" if name == "ray" else name, *rest))


def test_a_missing_library_is_told_with_what_installs_it(folder, without_ray):
    with pytest.raises(ConfigError) as told:
        resolve("run.yaml")
    assert "pip install 'areal-ray[ray]'" in str(told.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launcher.address=null", "launcher.nodes=2"], "use nodes: 1 or strategy: PACK"),
        (["launcher.address=ray://head:10001"], "ray://head:10001 is no address"),
        (["placement.training=[0,1]"], "placement names GPU 1, and 1 nodes with 0 GPUs each have 0"),
        (
            ["placement.training=[0]", "launcher.gpus_per_node=1", "launcher.trainer_processes=2"],
            "2 ranks do not fit on 1 GPUs",
        ),
        (["placement.generation=[15,16]", "launcher.nodes=2", "launcher.gpus_per_node=8"], "placement names GPU 16"),
        ([], ""),
        (["placement.generation=[15]", "launcher.nodes=2", "launcher.gpus_per_node=8"], ""),
        (["launcher.address=null", "launcher.nodes=2", "launcher.strategy=PACK"], ""),
    ],
)
def test_what_cannot_be_is_told(folder, with_ray, words, told):
    if not told:
        assert resolve("run.yaml", [], words).config.launcher.target == "ray/ray"
        return
    with pytest.raises(ConfigError) as error:
        resolve("run.yaml", [], words)
    assert told in str(error.value)


def test_nodes_are_given_variables_by_name_or_pattern():
    settings = RaySettings(pass_environment=["HF_*", "MINE"])
    environment = {"HF_HOME": "/models", "MINE": "1", "MINES": "2", "SECRET": "3"}
    assert settings.passed(environment) == {"HF_HOME": "/models", "MINE": "1"}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launcher.type=core/local"], "add: launcher.type=ray"),
        (["launcher.address=null"], "add: launcher.address=auto"),
        (["run_dir=."], "exists already"),
    ],
)
def test_a_job_that_could_not_be_what_was_asked_for_is_not_submitted(folder, with_ray, words, told):
    with pytest.raises(UsageError) as error:
        main(["run.yaml", *words])
    assert told in str(error.value)


def test_an_actor_cleans_the_environment_and_kills_a_warden_that_does_not_end_itself(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_SOMETHING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    actor, told = WardenActor(False, {"OWN": "2"}), []
    code = "import os, pathlib, time; print(*sorted(os.environ), flush=True); pathlib.Path('up').touch(); "
    command = [sys.executable, "-c", f"{code} time.sleep(600)"]
    holding = threading.Thread(target=lambda: told.append(actor.hold(command, {"GIVEN": "3"}, str(tmp_path))))
    holding.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert actor.end(0.2) == []
    holding.join(60)
    assert not holding.is_alive()
    assert {"OWN", "GIVEN", "CUDA_VISIBLE_DEVICES"} <= {*told[0].split()}
    assert not {"RAY_SOMETHING", "OMP_NUM_THREADS"} & {*told[0].split()}
