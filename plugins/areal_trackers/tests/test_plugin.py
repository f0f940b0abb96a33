"""The records lead to what exists, configs need no library, and a missing one is told before anything starts."""

import inspect
from pathlib import Path

import pytest

from areal_core.config import resolve
from areal_core.errors import ConfigError
from areal_core.plugins import PluginManager
from areal_core.sdk import Tracker
from areal_testing.conformance import PluginSuite

NAMES = ["mlflow", "prometheus", "tensorboard", "trackio", "wandb"]
LIBRARY = {"prometheus": "prometheus_client"}
PARTS = """
class Part:
    def __init__(self): ...
"""
RUN = """
steps: 1
model: {path: tiny}
dataset: parts.py:Part
workflow: single_turn
inference_engine: parts.py:Part
train_engine: parts.py:Part
algorithm: parts.py:Part
"""


@pytest.fixture
def read(tmp_path, monkeypatch):
    """A function that resolves a config with these overrides."""
    monkeypatch.chdir(tmp_path)
    Path("parts.py").write_text(PARTS)
    Path("run.yaml").write_text(RUN)
    return lambda *overrides: resolve("run.yaml", overrides=overrides, environment={}).config


class TestPlugin(PluginSuite):
    plugin = "trackers"
    heavy = ("torch", "transformers", "tensorboard", "wandb", "trackio", "prometheus_client", "mlflow")


def test_the_records_lead_to_trackers():
    manager = PluginManager.load(["trackers"])
    records = [record for record in manager.components("trackers") if record.plugin == "trackers"]
    assert sorted(record.name for record in records) == NAMES
    for record in records:
        target = manager.import_from(record, record.target)
        for name in ("start", "log", "close"):
            wanted = inspect.signature(getattr(Tracker, name)).parameters
            assert list(inspect.signature(getattr(target, name)).parameters) == list(wanted)


@pytest.mark.slow
def test_a_config_chooses_several(read):
    pytest.importorskip("tensorboard")
    pytest.importorskip("trackio")
    chosen = read("trackers=[trackers/tensorboard, {type: trackers/trackio, project: sums}]").trackers
    assert [selection.target for selection in chosen] == ["trackers/tensorboard", "trackers/trackio"]
    assert chosen[1].settings.project == "sums"


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_library_names_its_extra(name, read, without):
    library = LIBRARY.get(name, name)
    without(library)
    with pytest.raises(ConfigError) as caught:
        read(f"trackers=[trackers/{name}]")
    message = f"the tracker {name} needs the library {library}, which is not installed: pip install "
    assert f"{message}'./plugins/areal_trackers[{name}]'" in str(caught.value)
    manager = PluginManager.load(["trackers"])
    record = manager.find("trackers", f"trackers/{name}")
    tracker, settings = manager.import_from(record, record.target), manager.import_from(record, record.config)
    with pytest.raises(ConfigError, match="which is not installed"):
        tracker(settings())
