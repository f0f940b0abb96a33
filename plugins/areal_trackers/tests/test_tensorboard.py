"""What was logged, read back from the event files by TensorBoard itself."""

import pytest

pytest.importorskip("tensorboard")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from areal_testing.conformance import TrackerSuite
from areal_trackers.config import TensorBoardSettings
from areal_trackers.tensorboard import TensorBoardTracker

pytestmark = pytest.mark.slow


def track(run_dir, steps, config=None, **settings):
    tracker = TensorBoardTracker(TensorBoardSettings(**settings))
    tracker.start(run_dir, config or {"seed": 1, "model": {"path": "tiny"}})
    for step in steps:
        tracker.log(step, {"reward": step / 4, "time/step_s": 2.0})
    tracker.close()
    tracker.close()


def read(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return events


def scalars(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_metrics_and_config_are_in_the_run_folder(run_dir):
    track(run_dir, [0, 1, 2])
    events = read(run_dir / "tensorboard")
    assert scalars(events, "reward") == [(0, 0.0), (1, 0.25), (2, 0.5)]
    assert scalars(events, "time/step_s") == [(0, 2.0), (1, 2.0), (2, 2.0)]
    (config,) = events.Tensors("config/text_summary")
    assert b'    "seed": 1' in config.tensor_proto.string_val[0]


def test_a_resumed_run_takes_the_place_of_the_steps_that_were_lost(run_dir):
    track(run_dir, [1, 2, 3, 4])
    track(run_dir, [3, 4, 5])
    assert scalars(read(run_dir / "tensorboard"), "reward") == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0), (5, 1.25)]


def test_another_folder(run_dir):
    track(run_dir, [1], folder="events")
    assert scalars(read(run_dir / "events"), "reward") == [(1, 0.25)]


def test_a_run_that_ends_before_its_first_step_leaves_nothing(run_dir):
    track(run_dir, [])
    assert list(run_dir.iterdir()) == []


def test_logging_before_the_start_is_a_mistake(run_dir):
    with pytest.raises(RuntimeError, match="log was called before start"):
        TensorBoardTracker(TensorBoardSettings()).log(1, {})


class TestConformance(TrackerSuite):
    component = "trackers/tensorboard"

    def logged(self, run_dir):
        events = read(run_dir / "tensorboard")
        names = events.Tags()["scalars"]
        return {(step, name): value for name in names for step, value in scalars(events, name)}
