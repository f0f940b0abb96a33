"""Guards: what areal does around each hook implementation of a plugin, so that its answers and errors carry its name.

pluggy calls the implementations of a hook in one go, and knows neither which plugin an answer is from nor which one has
raised an error. Therefore each implementation is registered inside a guard.
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, Final

from areal_core.errors import PluginBrokenError
from areal_core.plugins.markers import PROJECT

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping

CAUGHT: Final = (Exception, SystemExit)
"""What guards catch. A plugin that exits the program is broken like one that raises."""


class Guard:
    """Wraps one hook implementation. The default returns its result and raises its errors."""

    def is_off(self) -> bool:
        """Return whether the plugin is no longer called."""
        return False

    def give(self, argument: object) -> object:
        """Return what an implementation gets for an argument of the call."""
        return argument

    def take(self, answer: Any) -> Any:
        """Return what an implementation has answered, checked and with the plugin's name."""
        return answer

    def take_wrapped(self, answer: Any, inner: Any) -> Any:
        """Return what a wrapper has answered, checked and with the plugin's name.

        Args:
            answer: of the wrapper: a list, as pluggy returns it.
            inner: the list that the wrapper got.
        """
        return answer

    def report(self, error: BaseException) -> None:
        """Raise an error that names the plugin. Or log it, and return if the other plugins are still to be called."""
        raise error


def guarded(function: Callable[..., Any], options: Mapping[str, Any], guard: Guard) -> Callable[..., Any]:
    """Return an implementation for pluggy that calls a plugin's function inside its guard.

    Args:
        function: of the plugin; a generator function if it is a wrapper.
        options: of its `hookimpl` mark.
        guard: of the plugin and the hook.
    """

    @functools.wraps(function)
    def call(*arguments: object) -> object:
        if guard.is_off():
            return None
        try:
            return guard.take(function(*map(guard.give, arguments)))
        except CAUGHT as error:
            guard.report(error)
            return None

    @functools.wraps(function)
    def wrap(*arguments: object) -> Generator[None, Any, Any]:
        if guard.is_off():
            return (yield)
        around = function(*map(guard.give, arguments))
        try:
            next(around)
        except CAUGHT as error:  # StopIteration: it has ended without a `yield`
            guard.report(error)
            return (yield)
        inner, raised = None, None
        try:
            inner = yield
            resume = functools.partial(around.send, inner)
        except BaseException as error:  # noqa: BLE001 - the wrapper decides about an error of an implementation
            raised, resume = error, functools.partial(around.throw, error)
        try:
            return guard.take_wrapped(_last_answer(resume), inner)
        except CAUGHT as error:
            if error is raised:  # it names its plugin already
                raise
            guard.report(error)
            return inner

    implementation = wrap if options["wrapper"] else call
    setattr(implementation, f"{PROJECT}_impl", options)
    return implementation


def check_form(function: Callable[..., Any], options: Mapping[str, Any], title: str) -> None:
    """Raise `PluginBrokenError` for an implementation that pluggy would accept and call in another way than expected.

    Args:
        function: of the plugin.
        options: of its `hookimpl` mark.
        title: of the plugin, for the error.
    """
    name = getattr(function, "__name__", "a hook")
    if options["hookwrapper"]:
        raise PluginBrokenError(
            f"{title}: {name} is a wrapper of pluggy's old style",
            hints=("write @hookimpl(wrapper=True), and return what `yield` returned",),
        )
    if options["wrapper"] and not inspect.isgeneratorfunction(function):
        raise PluginBrokenError(
            f"{title}: {name} is marked as a wrapper and has no `yield`",
            hints=("a wrapper calls the other implementations where it yields: answers = yield",),
        )
    defaults = [each.name for each in inspect.signature(function).parameters.values() if each.default is not each.empty]
    if defaults:
        raise PluginBrokenError(
            f"{title}: {name} has a default for {', '.join(defaults)}: pluggy would pass the default, not the value",
            hints=("remove the default",),
        )


def _last_answer(resume: Callable[[], object]) -> Any:
    """Run a wrapper from its `yield` to its end, and return its answer."""
    try:
        resume()
    except StopIteration as end:
        return end.value
    raise RuntimeError("a hook wrapper must yield once, and this one yields twice")
