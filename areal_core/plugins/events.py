"""The typed side of the event hooks: one method per event, the only way in which areal's code tells plugins anything.

pluggy's own relay is untyped and stops at the first exception. Here every plugin is called by itself: an error
before the run has begun ends the program and names the plugin; an error of an observer while the run goes on is
logged, and that plugin hears no more.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from areal_core.errors import PluginBrokenError, RunError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pluggy
    from pydantic import BaseModel

logger = logging.getLogger(__name__)


class Events:
    """Tells the loaded plugins what happens in a run; see `areal_core.plugins.hooks` for when each is called."""

    def __init__(self, relay: pluggy.PluginManager) -> None:
        self._relay = relay
        self.silenced: set[str] = set()
        """Plugins that raised an exception and hear no more."""
        self.log: Callable[[str], None] = logger.warning
        """Shows a line that a plugin returned to whoever watches the run."""

    def has_listeners(self, hook: str) -> bool:
        """Whether a plugin implements a hook."""
        return bool(getattr(self._relay.hook, hook).get_hookimpls())

    def configure(self, config: BaseModel) -> None:
        """The config is complete and checked; an exception ends the program with exit code 2."""
        for name, error in self._call("areal_configure", config=config):
            raise PluginBrokenError(f"plugin '{name}' refuses the config in areal_configure: {error}") from error

    def run_started(self, config: BaseModel, run_dir: Path) -> None:
        """A run begins or goes on; an exception ends it with exit code 1."""
        for name, error in self._call("areal_run_started", config=config, run_dir=run_dir):
            raise RunError(f"plugin '{name}' failed in areal_run_started: {error}") from error

    def step_finished(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
        """A step is over; an exception silences the plugin."""
        self._observe("areal_step_finished", run_dir=run_dir, step=step, metrics=metrics)

    def batch_logged(self, run_dir: Path, step: int, batch: object) -> None:
        """A few groups of a batch have been trained on; an exception silences the plugin."""
        self._observe("areal_batch_logged", run_dir=run_dir, step=step, batch=batch)

    def weights_synced(self, run_dir: Path, step: int, version: int) -> None:
        """The sync of `version` has begun; an exception silences the plugin."""
        self._observe("areal_weights_synced", run_dir=run_dir, step=step, version=version)

    def checkpoint_saved(self, run_dir: Path, step: int, path: Path) -> None:
        """A checkpoint is committed at `path`; an exception silences the plugin."""
        self._observe("areal_checkpoint_saved", run_dir=run_dir, step=step, path=path)

    def run_finished(self, run_dir: Path, outcome: str, signal: int = 0) -> None:
        """The run is over, asked by a signal where it is not 0; an exception is logged and changes nothing."""
        self._observe("areal_run_finished", run_dir=run_dir, outcome=outcome, signal=signal)

    def _observe(self, hook: str, **arguments: object) -> None:
        for name, error in self._call(hook, **arguments):
            self.silenced.add(name)
            logger.error("plugin '%s' failed in %s and receives no further events", name, hook, exc_info=error)

    def _call(self, hook: str, **arguments: object) -> list[tuple[str, BaseException]]:
        """Call every plugin that implements `hook`, and collect what they raise.

        The order is that of the names; as in pluggy, `tryfirst` comes before all others and `trylast` after them.
        """
        failures: list[tuple[str, BaseException]] = []
        lines: list[str] = []
        implementations = getattr(self._relay.hook, hook).get_hookimpls()
        for implementation in sorted(implementations, key=lambda i: (i.trylast, not i.tryfirst, i.plugin_name)):
            if implementation.plugin_name in self.silenced:
                continue
            try:
                told = implementation.function(*(arguments[name] for name in implementation.argnames))
                lines += [told] if isinstance(told, str) else told if isinstance(told, list | tuple) else ()
            except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it raises is reported under its name
                failures.append((implementation.plugin_name, error))
        for line in lines:
            self.log(line)
        return failures
