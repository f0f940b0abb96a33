"""The typed side of the event hooks: a method for each event. The core calls event hooks only here.

pluggy calls all implementations of an event. A guard around each one (`guards.py`) handles its errors. Before the run
has begun, an error ends the program. During the run it is logged, that plugin gets no further events, and the others
are called as usual.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from areal_core.errors import PluginBrokenError, RunError, writable
from areal_core.metric_names import prefix_of, prefixed
from areal_core.plugins.guards import Guard

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    import pluggy
    from pydantic import BaseModel

logger = logging.getLogger(__name__)

AWAITED = ("areal_add_metrics", "areal_should_stop")
"""Event hooks that training waits for."""


class Events:
    """Calls the event hooks of the loaded plugins. `areal_core.plugins.hooks` says when each is called.

    Attributes:
        relay: pluggy's manager of the plugins that are loaded now; the plugin manager sets it.
        silenced: plugins that have raised an exception and get no further events.
        log: shows a line that a plugin returned to the user.
        on_silenced: called with a message about a plugin that gets no further events.
    """

    relay: pluggy.PluginManager

    def __init__(self) -> None:
        self.silenced: set[str] = set()
        self.log: Callable[[str], None] = logger.warning
        self.on_silenced: Callable[[str], None] = lambda _: None

    def has_listeners(self, hook: str) -> bool:
        """Return whether a plugin implements a hook."""
        return bool(getattr(self.relay.hook, hook).get_hookimpls())

    def can_stop(self, plugin: str) -> bool:
        """Return whether a plugin decides when the run stops."""
        return plugin in {each.plugin_name for each in self.relay.hook.areal_should_stop.get_hookimpls()}

    @property
    def are_awaited(self) -> bool:
        """Whether a plugin implements a hook that training waits for."""
        return any(self.has_listeners(hook) for hook in AWAITED)

    def configure(self, config: BaseModel) -> None:
        """Report that the config is complete and checked. Raises `PluginError` if a plugin does."""
        self._call("areal_configure", config=config)

    def run_started(self, config: BaseModel, run_dir: Path) -> None:
        """Report that a run starts or resumes. Raises `RunError` if a plugin raises."""
        self._call("areal_run_started", config=config, run_dir=run_dir)

    def add_metrics(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics that plugins add to a step. Their names have the plugins' names in front."""
        answers = self._call("areal_add_metrics", run_dir=run_dir, step=step, metrics=metrics)
        return {name: value for added in reversed(answers) for name, value in added.items()}

    def should_stop(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> str:
        """Return the reasons for which plugins stop the run, with the plugins' names; empty if none does."""
        return "; ".join(reversed(self._call("areal_should_stop", run_dir=run_dir, step=step, metrics=metrics)))

    def step_finished(self, run_dir: Path, step: int, metrics: Mapping[str, float]) -> None:
        """Report that the metrics of a step are final."""
        self._show(self._call("areal_step_finished", run_dir=run_dir, step=step, metrics=metrics))

    def batch_logged(self, run_dir: Path, step: int, batch: object) -> None:
        """Report the tokens of a few groups of a batch that was trained on."""
        self._call("areal_batch_logged", run_dir=run_dir, step=step, batch=batch)

    def weights_synced(self, run_dir: Path, step: int, version: int) -> None:
        """Report that the sync of `version` has begun."""
        self._call("areal_weights_synced", run_dir=run_dir, step=step, version=version)

    def checkpoint_saved(self, run_dir: Path, step: int, path: Path) -> None:
        """Report that the checkpoint at `path` is committed."""
        self._call("areal_checkpoint_saved", run_dir=run_dir, step=step, path=path)

    def run_finished(self, run_dir: Path, outcome: str, signal: int = 0) -> None:
        """Report that the run has ended."""
        self._show(self._call("areal_run_finished", run_dir=run_dir, outcome=outcome, signal=signal))

    def _call(self, name: str, **arguments: object) -> list[Any]:
        """Return the answers of all plugins except None, in the order in which pluggy called them."""
        answers: list[Any] = getattr(self.relay.hook, name)(hook=self.relay.hook, **arguments)
        return answers

    def _show(self, answers: list[Any]) -> None:
        for answer in answers:
            for line in [answer] if isinstance(answer, str) else answer if isinstance(answer, list | tuple) else ():
                self.log(line)


class EventGuard(Guard):
    """The guard of one plugin in one event hook.

    Args:
        events: of the process.
        plugin: name of the plugin.
        hook: name of the hook.
    """

    def __init__(self, events: Events, plugin: str, hook: str) -> None:
        self._events = events
        self._plugin = plugin
        self._hook = hook

    def is_off(self) -> bool:
        """See `Guard.is_off`."""
        return self._plugin in self._events.silenced

    def give(self, argument: object) -> object:
        """See `Guard.give`. Each plugin has its own copy of the metrics, and may change it."""
        return dict(argument) if isinstance(argument, dict) else argument

    def take(self, answer: Any) -> Any:
        """See `Guard.take`."""
        match self._hook:
            case "areal_add_metrics" if answer is not None:
                return self._named(answer, {})
            case "areal_should_stop":
                return self._reason(answer) if answer else None
        return answer

    def take_wrapped(self, answer: Any, inner: Any) -> Any:
        """See `Guard.take_wrapped`. What the wrapper itself has added gets its plugin's name."""
        if not isinstance(answer, list):
            raise TypeError(
                f"a wrapper of {self._hook} returned {answer!r:.80}; it must return a list, as `yield` does"
            )
        match self._hook:
            case "areal_add_metrics":
                known = {name: value for added in inner for name, value in added.items()}
                return [self._named(added, known) for added in answer]
            case "areal_should_stop":
                return [reason if reason in inner else self._reason(reason) for reason in answer if reason]
        return answer

    def report(self, error: BaseException) -> None:
        """See `Guard.report`."""
        match self._hook:
            case "areal_configure":
                message = f"plugin '{self._plugin}' refuses the config in areal_configure: {error}"
                raise PluginBrokenError(message) from error
            case "areal_run_started":
                raise RunError(f"plugin '{self._plugin}' failed in areal_run_started: {error}") from error
        self._events.silenced.add(self._plugin)
        message = f"plugin '{self._plugin}' failed in {self._hook} and receives no further events"
        logger.error("%s", message, exc_info=error)
        lost = "; the run is no longer stopped by it" if self._events.can_stop(self._plugin) else ""
        self._events.on_silenced(writable(f"{message}{lost}: {type(error).__name__}: {error}"))

    def _named(self, metrics: Mapping[str, float], known: Mapping[str, float]) -> dict[str, float]:
        """Return metrics with the plugin's prefix, except for those that another plugin has added."""
        prefix = prefix_of(self._plugin)
        return {name if name in known else prefixed(prefix, name): float(value) for name, value in metrics.items()}

    def _reason(self, reason: object) -> str:
        if not isinstance(reason, str):
            raise TypeError(f"areal_should_stop returned {reason!r:.80}; it must return a text or None")
        return f"{' '.join(writable(reason).split())} (plugin '{self._plugin}')"
