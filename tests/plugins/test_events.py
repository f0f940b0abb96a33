"""What event hooks are given, what their answers do, and what their errors do."""

from __future__ import annotations

import importlib.metadata
import logging
from pathlib import Path
from typing import Any

import pytest

from areal_core.errors import PluginBrokenError, RunError
from areal_core.plugins import hookimpl
from areal_core.plugins.catalog import Installed
from areal_core.plugins.events import Events
from areal_core.plugins.markers import GROUP
from areal_core.plugins.registration import Imported, connect, import_plugin, read_implementations

RUN = Path("run")


class Observer:
    """Observes everything and remembers it; fails in the hook that it is given."""

    def __init__(self, fails_in: str = "") -> None:
        self.events: list[tuple[object, ...]] = []
        self.fails_in = fails_in

    def _on_event(self, *event: object) -> None:
        self.events.append(event)
        if event[0] == self.fails_in:
            raise ValueError("observer is tired")

    @hookimpl
    def areal_configure(self, config):
        self._on_event("configure", config)

    @hookimpl
    def areal_run_started(self, run_dir):
        self._on_event("run_started", run_dir)

    @hookimpl
    def areal_step_finished(self, run_dir, step, metrics):
        self._on_event("step_finished", run_dir, step, dict(metrics))

    @hookimpl
    def areal_weights_synced(self, step, version):
        self._on_event("weights_synced", step, version)

    @hookimpl
    def areal_checkpoint_saved(self, step, path):
        self._on_event("checkpoint_saved", step, path)

    @hookimpl
    def areal_run_finished(self, outcome, signal):
        self._on_event("run_finished", outcome, signal)


def events_for(**plugins: object) -> Events:
    """Register objects as plugins, in the order in which they are named."""
    events = Events()
    imported = [import_plugin(Installed.core())]
    for name, plugin in plugins.items():
        point = importlib.metadata.EntryPoint(name, name, GROUP)
        installed = Installed(name, f"areal-{name}", "1", point, None)
        imported.append(Imported(installed, read_implementations(plugin, installed.title)))
    events.relay = connect(imported, events)
    return events


def plugin(hook: str, function: Any, **options: bool) -> object:
    """A plugin with one hook."""
    function.__name__ = hook
    return type("Plugin", (), {hook: staticmethod(hookimpl(**options)(function))})()


def report_everything(events: Events) -> None:
    events.configure("config")  # type: ignore[arg-type]
    events.run_started("config", RUN)  # type: ignore[arg-type]
    events.step_finished(RUN, 1, {"reward": 0.5})
    events.weights_synced(RUN, 1, 7)
    events.checkpoint_saved(RUN, 1, Path("checkpoint"))
    events.run_finished(RUN, "finished", 10)


def test_every_event_reaches_every_plugin_with_the_arguments_it_asks_for():
    one, other = Observer(), Observer()
    report_everything(events_for(one=one, other=other))
    assert one.events == other.events
    assert one.events == [
        ("configure", "config"),
        ("run_started", RUN),
        ("step_finished", RUN, 1, {"reward": 0.5}),
        ("weights_synced", 1, 7),
        ("checkpoint_saved", 1, Path("checkpoint")),
        ("run_finished", "finished", 10),
    ]


def test_an_error_before_the_run_ends_it_and_names_the_plugin():
    with pytest.raises(PluginBrokenError, match=r"plugin 'one' refuses the config.*observer is tired") as caught:
        report_everything(events_for(one=Observer("configure"), other=Observer()))
    assert caught.value.exit_code == 2
    with pytest.raises(RunError, match="plugin 'one' failed in areal_run_started") as failed:
        report_everything(events_for(one=Observer("run_started"), other=Observer()))
    assert failed.value.exit_code == 1


@pytest.mark.parametrize("order", [("bad", "good"), ("good", "bad")])
def test_an_error_of_an_observer_is_logged_and_silences_only_that_plugin(caplog, order):
    observers = {"bad": Observer("step_finished"), "good": Observer()}
    with caplog.at_level(logging.ERROR):
        report_everything(events_for(**{name: observers[name] for name in order}))
    assert [event[0] for event in observers["bad"].events] == ["configure", "run_started", "step_finished"]
    assert observers["good"].events[-1] == ("run_finished", "finished", 10)
    assert "plugin 'bad' failed in areal_step_finished and receives no further events" in caplog.text


def test_plugins_register_by_name_and_are_called_as_pluggy_calls_them():
    """The last name first; `tryfirst` and `trylast` change that, and a wrapper is around all others."""
    called: list[str] = []

    def observer(name: str, **options: bool) -> object:
        return plugin("areal_step_finished", lambda: called.append(name), **options)

    def around():
        called.append("before")
        answers = yield
        called.append("after")
        return answers

    events = events_for(
        d=observer("d"), a=observer("a", trylast=True), e=observer("e"), c=observer("c"),
        b=observer("b", tryfirst=True), aa=plugin("areal_step_finished", around, wrapper=True),
    )  # fmt: skip
    events.step_finished(RUN, 1, {})
    assert called == ["before", "b", "e", "d", "c", "a", "after"]


def raises_before():
    raise ValueError("before")
    yield


def raises_after():
    yield
    raise ValueError("after")


def yields_twice():
    yield
    yield


def never_yields():
    if False:
        yield


@pytest.mark.parametrize("broken", [raises_before, raises_after, yields_twice, never_yields])
def test_a_wrapper_that_fails_is_silenced_and_keeps_no_other_from_its_events_and_answers(caplog, broken):
    observer = Observer()
    events = events_for(
        a=observer,
        b=plugin("areal_step_finished", lambda: "a line"),
        z=plugin("areal_step_finished", broken, wrapper=True),
    )
    lines: list[str] = []
    events.log = lines.append
    for step in (1, 2):
        events.step_finished(RUN, step, {})
    assert events.silenced == {"z"}
    assert [event[2] for event in observer.events] == [1, 2]
    assert lines == ["a line", "a line"]
    assert caplog.text.count("plugin 'z' failed in areal_step_finished") == 1


def test_a_wrapper_sees_an_error_and_the_plugin_that_raised_it_is_named():
    seen: list[BaseException] = []

    def around():
        try:
            return (yield)
        except PluginBrokenError as error:
            seen.append(error)
            raise

    events = events_for(a=Observer("configure"), z=plugin("areal_configure", around, wrapper=True))
    with pytest.raises(PluginBrokenError, match="plugin 'a' refuses"):
        events.configure("config")  # type: ignore[arg-type]
    assert len(seen) == 1


# Metrics.

OWN = {"step": 1.0, "time/step_s": 2.0, "reward/mean": 0.5, "version": 3.0}


def test_metrics_of_a_plugin_have_its_name_in_front():
    events = events_for(
        guard=plugin("areal_add_metrics", lambda metrics: {"decline": 2 * metrics["reward/mean"], "guard/twice": 2}),
        nothing=plugin("areal_add_metrics", lambda: None),
        rewards=plugin("areal_add_metrics", lambda: {"failed": 1.0}),
    )
    assert events.add_metrics(RUN, 1, OWN) == {
        "guard/decline": 1.0, "guard/twice": 2.0, "plugin/rewards/failed": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize("name", [*OWN, "evaluation/reward", "train/loss", "", "\ud800"])
def test_no_name_of_a_metric_can_be_one_of_the_run(name):
    events = events_for(evil=plugin("areal_add_metrics", lambda: {name: -1.0}))
    (added,) = events.add_metrics(RUN, 1, OWN)
    assert added.startswith("evil/")
    added.encode()


def test_a_wrapper_adds_metrics_under_its_own_name_and_leaves_those_of_others():
    def around():
        return [*(yield), {"reward/mean": 7.0}]

    events = events_for(
        a=plugin("areal_add_metrics", lambda: {"one": 1}), z=plugin("areal_add_metrics", around, wrapper=True)
    )
    assert events.add_metrics(RUN, 1, OWN) == {"a/one": 1.0, "z/reward/mean": 7.0}


def test_a_plugin_that_changes_the_metrics_it_is_given_changes_nothing():
    metrics = dict(OWN)
    seen = []

    def good(metrics):
        seen.append(metrics)

    for hook in ("add_metrics", "should_stop", "step_finished"):
        events = events_for(
            z_first=plugin(f"areal_{hook}", lambda metrics: metrics.clear()),
            good=plugin(f"areal_{hook}", good),
        )
        getattr(events, hook)(RUN, 1, metrics)
        assert not events.silenced
    assert metrics == OWN
    assert seen == [OWN] * 3, "each plugin has its own copy"


@pytest.mark.parametrize("answer", [{"decline": "much"}, {"decline": None}, 3])
def test_metrics_that_are_no_numbers_silence_the_plugin(caplog, answer):
    events = events_for(a=plugin("areal_add_metrics", lambda: {"x": 1}), b=plugin("areal_add_metrics", lambda: answer))
    assert events.add_metrics(RUN, 1, OWN) == {"a/x": 1.0}
    assert events.silenced == {"b"}


# Stops.


@pytest.mark.parametrize("answer", [None, "", False])
def test_a_plugin_without_a_reason_stops_nothing(answer):
    assert events_for(guard=plugin("areal_should_stop", lambda: answer)).should_stop(RUN, 1, OWN) == ""


def test_reasons_name_their_plugins_in_the_order_of_the_names_and_have_one_line():
    events = events_for(
        b=plugin("areal_should_stop", lambda step: f"step {step}\nis enough"),
        a=plugin("areal_should_stop", lambda: "I do"),
    )
    assert events.should_stop(RUN, 7, OWN) == "I do (plugin 'a'); step 7 is enough (plugin 'b')"


def test_a_reason_that_is_no_text_silences_the_plugin(caplog):
    events = events_for(guard=plugin("areal_should_stop", lambda: True))
    shown: list[str] = []
    events.on_silenced = shown.append
    assert events.should_stop(RUN, 1, OWN) == ""
    assert events.silenced == {"guard"}
    assert "areal_should_stop returned True; it must return a text or None" in caplog.text
    (line,) = shown
    assert line.startswith(
        "plugin 'guard' failed in areal_should_stop and receives no further events; the run is no longer"
    )
    assert "it must return a text or None" in line


def test_a_wrapper_may_veto_a_stop_or_ask_for_one():
    def veto():
        yield
        return []

    def too(step):
        return [*(yield), "and I"]

    guard = plugin("areal_should_stop", lambda: "I do")
    vetoed = events_for(a=guard, z=plugin("areal_should_stop", veto, wrapper=True))
    assert vetoed.should_stop(RUN, 1, OWN) == ""
    joined = events_for(a=guard, z=plugin("areal_should_stop", too, wrapper=True))
    assert joined.should_stop(RUN, 1, OWN) == "and I (plugin 'z'); I do (plugin 'a')"


@pytest.mark.parametrize("hook", ["areal_should_stop", "areal_add_metrics"])
def test_a_wrapper_that_returns_no_list_is_silenced_and_the_answers_it_got_count(caplog, hook):
    """A text in place of the list would be read letter by letter."""

    def wrong():
        yield
        return "stop"

    events = events_for(a=plugin("areal_should_stop", lambda: "I do"), z=plugin(hook, wrong, wrapper=True))
    assert events.add_metrics(RUN, 1, OWN) == {}
    assert events.should_stop(RUN, 1, OWN) == "I do (plugin 'a')"
    assert events.silenced == {"z"}
    assert f"a wrapper of {hook} returned 'stop'; it must return a list" in caplog.text


def test_training_waits_only_if_a_plugin_has_a_hook_that_it_waits_for():
    assert not events_for(a=Observer()).are_awaited
    assert events_for(a=plugin("areal_should_stop", lambda: None)).are_awaited
