"""The records lead to what exists; settings say what cannot be; a missing library is told. No Ray is started here."""

import importlib.util
import sys
import threading
import time

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError, UsageError
from areal_core.interfaces.launcher import ProcessGroup
from areal_ray.actor import Member
from areal_ray.command import main
from areal_ray.config import RaySettings
from areal_testing.conformance import PluginSuite

pytestmark = pytest.mark.cluster

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
    assert "pip install './plugins/areal_ray[ray]'" in str(told.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["launcher.address=null", "launcher.nodes=2"], "has one machine: remove launcher.nodes"),
        (["launcher.address=ray://head:10001"], "ray://head:10001 is not an address"),
        (["placement.training=[0]", "launcher.trainer_processes=2"], "2 ranks do not fit on 1 GPUs"),
        ([], ""),
        (["launcher.address=null"], ""),
        (["placement.training=[0,1]", "placement.generation=[15]", "launcher.nodes=2"], ""),
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
        (["launcher.type=core/local"], "add: launcher.type=ray launcher.address=auto"),
        (["launcher.address=null"], "add: launcher.type=ray launcher.address=auto"),
        (["run_dir=."], "exists already"),
    ],
)
def test_a_job_that_could_not_be_what_was_asked_for_is_not_submitted(folder, with_ray, words, told):
    with pytest.raises(UsageError) as error:
        main(["run.yaml", *words])
    assert told in str(error.value)


def groups(*sizes, **more):
    return [
        ProcessGroup(f"g-{n}", "server", [], count=count, gpus_each=gpus, **more)
        for n, (count, gpus) in enumerate(sizes)
    ]


@pytest.mark.parametrize(
    ("asked", "nodes", "bundles"),
    [
        ([], None, [0]),
        (groups((1, 0), (2, 0)), None, [0]),
        (groups((1, 0)), 3, [0, 0, 0]),
        (groups((4, 1), (1, 2), (1, 0)), None, [1, 1, 1, 1, 2]),
        (groups((16, 1)), 2, [8, 8]),
        (groups((3, 1)), 2, [2, 2]),
    ],
)
def test_a_bundle_for_each_member_with_gpus_or_for_each_machine(asked, nodes, bundles):
    pytest.importorskip("ray")
    from areal_ray.cluster import bundles_for

    assert bundles_for(asked, nodes) == bundles


def test_gpus_that_are_used_in_common_are_counted_once_in_the_larger_parts():
    pytest.importorskip("ray")
    from areal_ray.cluster import bundles_for

    ranks = ProcessGroup("trainer", "trainer", [], count=4, gpus_each=1)
    assert bundles_for([ranks, *groups((1, 2), (1, 2), shares_gpus=True)], None) == [2, 2]
    assert bundles_for([ranks, *groups((1, 2), shares_gpus=True)], None) == [1, 1, 1, 1]
    assert bundles_for([ranks, *groups((1, 2), shares_gpus=True), *groups((1, 8))], None) == [8, 1, 1, 1, 1]


def test_gpus_that_are_named_are_of_one_machine_however_many_servers_they_have():
    pytest.importorskip("ray")
    from areal_ray.cluster import bundles_for

    assert bundles_for([*groups(*[(1, 1)] * 3, gpus=(0,)), *groups((1, 1), gpus=(1,))], None) == [2]


def test_an_actor_cleans_the_environment_and_ends_what_it_has_started(monkeypatch, tmp_path):
    monkeypatch.setenv("RAY_SOMETHING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    member, told = Member(), []
    code = "import os, pathlib, time; pathlib.Path('up').write_text(' '.join(os.environ)); time.sleep(600)"
    words = [sys.executable, "-c", code], {"GIVEN": "3"}, str(tmp_path)
    running = threading.Thread(target=lambda: told.append(member.run(*words)))
    running.start()
    deadline = time.monotonic() + 60
    while not (tmp_path / "up").exists() or not (shown := {*(tmp_path / "up").read_text().split()}):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    member.end()
    running.join(60)
    assert told == ["was killed by SIGKILL"]
    assert "GIVEN" in shown
    assert not {"RAY_SOMETHING", "OMP_NUM_THREADS"} & shown
    member.end()


def test_what_a_member_wrote_before_it_came_is_told(tmp_path):
    assert (
        Member().run(["sh", "-c", "echo some words; exit 3"], {}, str(tmp_path)) == "ended with exit code 3 some words"
    )
    for command, folder in (["/no/such"], tmp_path), (["true"], "/no/such"):
        assert "/no/such" in Member().run(command, {}, str(folder))
