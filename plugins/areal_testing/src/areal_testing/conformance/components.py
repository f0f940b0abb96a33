"""The base of suites of components that a config names: it makes a component as a run does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.config import needs_of, select
from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.config import Selection
    from areal_core.plugins import Kind
    from areal_core.sdk import ForwardPass, Role


class ComponentSuite:
    """The base of suites of components that a config names.

    Attributes:
        kind: name of one of the core's kinds, or the `Kind` that a plugin adds. The suite sets it.
        component: `plugin/name` of an installed plugin, or an import such as `package.module:function`.
        settings: keys beside `type:` in the config.
        needed: roles and forward passes that the component needs, if `make` is overridden and `component` is empty.
    """

    kind: ClassVar[str | Kind]
    component = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    needed: ClassVar[Sequence[Role | ForwardPass]] = ()

    def make(self) -> Any:
        """Return a new component. Override this if the component is not made from a config."""
        return self.select().build()

    def needs(self) -> Sequence[Role | ForwardPass]:
        """Return the roles and forward passes that the component needs with two updates per batch."""
        return [*needs_of(self.select(), 2)] if self.component else self.needed

    def select(self) -> Selection:
        """Return the config's selection of `component` with `settings`.

        Raises:
            NotImplementedError: `component` is empty.
            AssertionError: a config that selects this component is invalid.
        """
        if not self.component:
            raise NotImplementedError(f"{type(self).__name__} must set `component` or override make")
        try:
            return select(self.kind, {"type": self.component, **self.settings})
        except ConfigError as error:
            raise AssertionError(f"a config with {self.component} is invalid: {error}") from error
