"""The calls to wandb, against a stand-in; tests/integration/test_view.py has the library itself, offline."""

import importlib
import importlib.util
from types import SimpleNamespace

import pytest

from areal_trackers.config import WandbSettings
from areal_trackers.wandb import WandbTracker

pytestmark = pytest.mark.slow


class Stand:
    """Records calls as `wandb` and as the run that `wandb.init` returns."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call

    def named(self, name):
        return [(arguments, options) for called, arguments, options in self.calls if called == name]


@pytest.fixture
def library(monkeypatch):
    stand, find, load = Stand(), importlib.util.find_spec, importlib.import_module
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: SimpleNamespace() if name == "wandb" else find(name, *rest)
    )
    monkeypatch.setattr(importlib, "import_module", lambda name, *rest: stand if name == "wandb" else load(name, *rest))
    return stand


def test_a_run_is_told_with_its_steps(library, run_dir):
    tracker = WandbTracker(WandbSettings(project="sums", tags=["small"], mode="offline"))
    tracker.start(run_dir, {"seed": 1})
    tracker.log(7, {"reward": 0.5})
    tracker.close()
    tracker.close()
    ((_, options),) = library.named("init")
    assert options["project"] == "sums"
    assert options["name"] == "addition"
    assert options["config"] == {"seed": 1}
    assert options["dir"] == str(run_dir)
    assert options["mode"] == "offline"
    assert library.named("log") == [(({"reward": 0.5, "step": 7},), {})]
    assert (("*",), {"step_metric": "step"}) in library.named("define_metric")
    assert len(library.named("finish")) == 1


def test_a_resumed_run_goes_on_as_the_same(library, run_dir, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    for folder in (run_dir, run_dir, other):
        tracker = WandbTracker(WandbSettings(name="mine"))
        tracker.start(folder, {})
        tracker.close()
    first, second, third = (options for _, options in library.named("init"))
    assert first["id"] == second["id"] != third["id"]
    assert first["resume"] == second["resume"] == "allow"
    assert third["name"] == "mine"


def test_the_real_library_offline(run_dir):
    pytest.importorskip("wandb")
    tracker = WandbTracker(WandbSettings(mode="offline"))
    tracker.start(run_dir, {"seed": 1})
    tracker.log(1, {"reward": 0.5})
    tracker.close()
    assert list(run_dir.glob("wandb/offline-run-*"))
