"""What those who watch a run must do: trackers and event hooks. They may not get in its way."""

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
"""Of steps: names come and go, and numbers need not be finite."""


CONFIG = f"""
steps: 3
model: {{path: tiny}}
dataset: {__name__}:Part
train_engine: {__name__}:Part
algorithm: {__name__}:Part
"""
"""A config whose components do nothing."""


class Part:
    """Stands for the components of a config that nobody builds."""


def begin_run(run_dir: Path) -> RunConfig:
    """Make a run folder with a complete config, as the driver leaves it before a run starts; return the config."""
    run_dir.mkdir(exist_ok=True)
    file = RunFolder(run_dir).config
    file.write_text(CONFIG, encoding="utf-8")
    resolved = load_run(run_dir)
    file.write_text(resolved.to_yaml(), encoding="utf-8")
    return resolved.config


class TrackerSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`; `logged` says what has arrived.

    A tracker that needs a network is tested with the settings that keep it off it.
    """

    kind: ClassVar[str] = "trackers"

    def logged(self, run_dir: Path) -> dict[tuple[int, str], float]:
        """By step and name, what the tracker's own library reads back from a run folder."""
        raise NotImplementedError(f"{type(self).__name__} must say how what was logged is read back")

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

    def test_everything_that_is_finite_arrives(self, tmp_path: Path) -> None:
        """Under its step and its name."""
        self._track(tmp_path / "run", range(1, 4))
        found = self.logged(tmp_path / "run")
        for step, metrics in enumerate(METRICS, start=1):
            for name, value in metrics.items():
                if math.isfinite(value) and "[" not in name:
                    assert math.isclose(found.get((step, name), math.nan), value, rel_tol=1e-6), (step, name)

    def test_a_resumed_run_goes_on(self, tmp_path: Path) -> None:
        """A new object over the same run folder keeps what was logged, and logs a step again."""
        self._track(tmp_path / "run", range(1, 3))
        self._track(tmp_path / "run", range(2, 4))
        steps = {step for step, name in self.logged(tmp_path / "run") if name == "reward/mean"}
        assert steps >= {1, 2}, f"steps {sorted(steps)} are left of 1 to 3"


class EventsSuite:
    """Set `plugin`: the name of an installed plugin that implements event hooks.

    Attributes:
        plugin: as in `--plugins`.
    """

    plugin = ""

    def _call_hooks(self, run_dir: Path, outcome: str, steps: range) -> Any:
        """Everything that a run tells, as it tells it; the events, which know who was silenced."""
        events, config = PluginManager.load([self.plugin]).events, begin_run(run_dir)
        events.configure(config)
        events.run_started(config, run_dir)
        for step in steps:
            events.weights_synced(run_dir, step, step + 10)
            with (run_dir / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "time": float(step), **METRICS[step - 1]}) + "\n")
            events.step_finished(run_dir, step, dict(METRICS[step - 1]))
            folder = run_dir / "attempts" / "1" / "checkpoints" / f"step-{step:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            events.checkpoint_saved(run_dir, step, folder)
        events.run_finished(run_dir, outcome)
        return events

    def test_it_hears_a_whole_run_without_an_exception(self, tmp_path: Path) -> None:
        """For each way in which a run may end."""
        for outcome in ("done", "interrupted", "failed"):
            events = self._call_hooks(tmp_path / outcome, outcome, range(1, 4))
            assert not events.silenced, f"it raised an exception and hears no more ({outcome}): see the log"

    def test_it_hears_a_run_that_was_resumed(self, tmp_path: Path) -> None:
        """In a new process, over a folder that it knows already."""
        self._call_hooks(tmp_path / "run", "interrupted", range(1, 2))
        assert not self._call_hooks(tmp_path / "run", "done", range(2, 4)).silenced

    def test_it_hears_a_run_that_ended_before_its_first_step(self, tmp_path: Path) -> None:
        """The folder is nearly empty then."""
        assert not self._call_hooks(tmp_path / "run", "failed", range(0)).silenced
