"""Making a component the way a run makes it: from its name and its settings in a config."""

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
    """The base of the suites of components that a config names.

    Attributes:
        kind: set by the suite: the name of one of the core's kinds, or the `Kind` that a plugin adds.
        component: `plugin/name` of an installed plugin, or an import such as `package.module:function`.
        settings: the keys that stand beside `type:` in the config.
        needed: what it needs of models, of one that `make` makes in another way than a config does.
    """

    kind: ClassVar[str | Kind]
    component = ""
    settings: ClassVar[Mapping[str, Any]] = {}
    needed: ClassVar[Sequence[Role | ForwardPass]] = ()

    def make(self) -> Any:
        """The component; override this to make it in another way than a run does."""
        return self.select().build()

    def needs(self) -> Sequence[Role | ForwardPass]:
        """What the component says that it needs of models, where two updates follow on a batch."""
        return [*needs_of(self.select(), 2)] if self.component else self.needed

    def select(self) -> Selection:
        """What a config would choose."""
        if not self.component:
            raise NotImplementedError(f"{type(self).__name__} must set `component` or override make")
        try:
            return select(self.kind, {"type": self.component, **self.settings})
        except ConfigError as error:
            raise AssertionError(f"a config cannot choose {self.component}: {error}") from error
