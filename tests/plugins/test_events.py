"""What plugins are told, and what their errors do."""

from __future__ import annotations

import logging
from pathlib import Path

import pluggy
import pytest

from areal_core.errors import PluginBrokenError, RunError
from areal_core.plugins import hookimpl, hooks
from areal_core.plugins.events import Events


class Listener:
    """Hears everything and remembers it; fails where it is told to."""

    def __init__(self, fails_in: str = "") -> None:
        self.heard: list[tuple[object, ...]] = []
        self.fails_in = fails_in

    def _on_message(self, *what: object) -> None:
        self.heard.append(what)
        if what[0] == self.fails_in:
            raise ValueError("listener is tired")

    @hookimpl
    def areal_configure(self, config):
        self._on_message("configure", config)

    @hookimpl
    def areal_run_started(self, run_dir):
        self._on_message("run_started", run_dir)

    @hookimpl
    def areal_step_finished(self, run_dir, step, metrics):
        self._on_message("step_finished", run_dir, step, dict(metrics))

    @hookimpl
    def areal_weights_synced(self, step, version):
        self._on_message("weights_synced", step, version)

    @hookimpl
    def areal_checkpoint_saved(self, step, path):
        self._on_message("checkpoint_saved", step, path)

    @hookimpl
    def areal_run_finished(self, outcome, signal):
        self._on_message("run_finished", outcome, signal)


def events_for(**listeners: Listener) -> Events:
    relay = pluggy.PluginManager("areal")
    relay.add_hookspecs(hooks)
    for name, listener in listeners.items():
        relay.register(listener, name)
    return Events(relay)


def tell_everything(events: Events) -> None:
    events.configure("config")  # type: ignore[arg-type]
    events.run_started("config", Path("run"))  # type: ignore[arg-type]
    events.step_finished(Path("run"), 1, {"reward": 0.5})
    events.weights_synced(Path("run"), 1, 7)
    events.checkpoint_saved(Path("run"), 1, Path("checkpoint"))
    events.run_finished(Path("run"), "finished", 10)


def test_every_event_reaches_every_plugin_with_the_arguments_it_asks_for():
    one, other = Listener(), Listener()
    tell_everything(events_for(one=one, other=other))
    assert one.heard == other.heard
    assert one.heard == [
        ("configure", "config"),
        ("run_started", Path("run")),
        ("step_finished", Path("run"), 1, {"reward": 0.5}),
        ("weights_synced", 1, 7),
        ("checkpoint_saved", 1, Path("checkpoint")),
        ("run_finished", "finished", 10),
    ]


def test_an_error_before_the_run_ends_it_and_names_the_plugin():
    with pytest.raises(PluginBrokenError, match=r"plugin 'one' refuses the config.*listener is tired") as caught:
        tell_everything(events_for(one=Listener("configure")))
    assert caught.value.exit_code == 2
    with pytest.raises(RunError, match="plugin 'one' failed in areal_run_started") as failed:
        tell_everything(events_for(one=Listener("run_started")))
    assert failed.value.exit_code == 1


def test_an_error_of_an_observer_is_logged_and_silences_only_that_plugin(caplog):
    bad, good = Listener("step_finished"), Listener()
    with caplog.at_level(logging.ERROR):
        tell_everything(events_for(bad=bad, good=good))
    assert [what[0] for what in bad.heard] == ["configure", "run_started", "step_finished"]
    assert good.heard[-1] == ("run_finished", "finished", 10)
    assert "plugin 'bad' failed in areal_step_finished and receives no further events" in caplog.text


def test_plugins_are_called_by_name_and_those_that_ask_for_it_first_or_last():
    called: list[str] = []

    def plugin(name: str, **options: bool) -> object:
        class Plugin:
            @hookimpl(**options)
            def areal_step_finished(self):
                called.append(name)

        return Plugin()

    relay = pluggy.PluginManager("areal")
    relay.add_hookspecs(hooks)
    for name, options in [("a", {"trylast": True}), ("d", {}), ("e", {"tryfirst": True}), ("c", {}), ("b", {})]:
        relay.register(plugin(name, **options), name)
    Events(relay).step_finished(Path("run"), 1, {})
    assert called == ["e", "b", "c", "d", "a"]
