"""Conformance suites of trackers and event hooks, which observe a run and must not disturb it."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.config import load_run
from areal_core.plugins import PluginManager
from areal_core.programs import RunFolder
from areal_testing.conformance.components import ComponentSuite

if TYPE_CHECKING:
    from pathlib import Path

    from areal_core.config import RunConfig

METRICS = (
    {"reward/mean": 0.25, "train/loss": -1.5, "time/step_s": 0.1},
    {"reward/mean": 0.5, "train/loss": math.nan, "groups/stale": 0.0},
    {"reward/mean": math.inf, "evaluation/reward": 0.75, "a name/with spaces [and] brackets": 1e-300},
)
"""Metrics of steps. Their names vary between steps, and numbers need not be finite."""


CONFIG = f"""
steps: 3
model: {{path: tiny}}
dataset: {__name__}:NoComponent
train_engine: {__name__}:NoComponent
algorithm: {__name__}:NoComponent
"""
"""A config with components that are never built."""


class NoComponent:
    """Stands for the components of a config that is never run."""


def begin_run(run_dir: Path) -> RunConfig:
    """Create a run folder with a resolved config, as the driver does before a run starts. Return the config."""
    run_dir.mkdir(exist_ok=True)
    file = RunFolder(run_dir).config
    file.write_text(CONFIG, encoding="utf-8")
    resolved = load_run(run_dir)
    file.write_text(resolved.to_yaml(), encoding="utf-8")
    return resolved.config


class TrackerSuite(ComponentSuite):
    """Tests of a tracker. Set `component` (and `settings`), or override `make`; override `logged`.

    Test a tracker that needs a network with settings that keep it offline.
    """

    kind: ClassVar[str] = "trackers"

    def logged(self, run_dir: Path) -> dict[tuple[int, str], float]:
        """Return the metrics of a run folder by step and name, as the tracker's own library reads them."""
        raise NotImplementedError(f"{type(self).__name__} must override logged and read what the tracker has logged")

    def _track(self, run_dir: Path, steps: range) -> None:
        config = begin_run(run_dir).model_dump(mode="json")
        tracker = self.make()
        before = copy.deepcopy(config)
        tracker.start(run_dir, config)
        for step in steps:
            metrics = dict(METRICS[step - 1])
            tracker.log(step, metrics)
            assert repr(metrics) == repr(dict(METRICS[step - 1])), "the tracker changed the metrics"
        tracker.close()
        tracker.close()
        assert config == before, "the tracker changed the config"

    def test_finite_metrics_are_logged(self, tmp_path: Path) -> None:
        """The tracker logs each finite metric under its step and its name."""
        self._track(tmp_path / "run", range(1, 4))
        logged = self.logged(tmp_path / "run")
        for step, metrics in enumerate(METRICS, start=1):
            for name, value in metrics.items():
                if math.isfinite(value) and "[" not in name:
                    assert math.isclose(logged.get((step, name), math.nan), value, rel_tol=1e-6), (step, name)

    def test_a_resumed_run_keeps_its_metrics(self, tmp_path: Path) -> None:
        """A new object with the same run folder keeps the logged metrics, and logs a step again."""
        self._track(tmp_path / "run", range(1, 3))
        self._track(tmp_path / "run", range(2, 4))
        steps = {step for step, name in self.logged(tmp_path / "run") if name == "reward/mean"}
        assert steps >= {1, 2, 3}, f"only the steps {sorted(steps)} of 1 to 3 are left"


class EventsSuite:
    """Tests of event hooks. Set `plugin`.

    Attributes:
        plugin: name of an installed plugin that implements event hooks, as in `--plugins`.
    """

    plugin = ""

    def _call_hooks(self, run_dir: Path, outcome: str, steps: range) -> Any:
        """Call the hooks of a whole run. Return the events, which record the plugins that raised an exception."""
        events, config = PluginManager.load([self.plugin]).events, begin_run(run_dir)
        events.configure(config)
        events.run_started(config, run_dir)
        first = {"evaluation/reward": 0.5, "time/step_s": 0.1}  # step 0: an evaluation before training
        events.should_stop(run_dir, 0, first | events.add_metrics(run_dir, 0, first))
        for step in steps:
            metrics = dict(METRICS[step - 1])
            metrics |= events.add_metrics(run_dir, step, metrics)
            events.should_stop(run_dir, step, metrics)
            events.weights_synced(run_dir, step, step + 10)
            with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "time": float(step), **METRICS[step - 1]}) + "\n")
            events.step_finished(run_dir, step, dict(METRICS[step - 1]))
            folder = run_dir / "attempts" / "1" / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            events.checkpoint_saved(run_dir, step, folder)
        events.run_finished(run_dir, outcome)
        return events

    def test_hooks_of_a_whole_run_raise_no_exception(self, tmp_path: Path) -> None:
        """No hook raises an exception, for each outcome of a run."""
        for outcome in ("done", "interrupted", "failed"):
            events = self._call_hooks(tmp_path / outcome, outcome, range(1, 4))
            assert not events.silenced, f"a hook raised an exception, so that the plugin is silenced ({outcome})"

    def test_hooks_of_a_resumed_run_raise_no_exception(self, tmp_path: Path) -> None:
        """No hook raises an exception if the run folder exists already."""
        self._call_hooks(tmp_path / "run", "interrupted", range(1, 2))
        assert not self._call_hooks(tmp_path / "run", "done", range(2, 4)).silenced

    def test_hooks_of_a_run_without_steps_raise_no_exception(self, tmp_path: Path) -> None:
        """No hook raises an exception if the run ends before its first step, with a nearly empty folder."""
        assert not self._call_hooks(tmp_path / "run", "failed", range(0)).silenced
