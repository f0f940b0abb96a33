"""Making a component the way a run makes it: from its name and its settings in a config."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from areal_core.config import needs_of
from areal_core.config.context import ResolutionContext
from areal_core.config.place import Place
from areal_core.config.problems import RejectedError
from areal_core.plugins import PluginManager

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.config import Selection
    from areal_core.sdk import ForwardPass, Role


class ComponentSuite:
    """The base of the suites of components that a config names.

    Attributes:
        kind: set by the suite.
        component: `plugin/name` of an installed plugin, or an import such as `package.module:function`.
        settings: the keys that stand beside `type:` in the config.
        needed: what it needs of models, of one that `make` makes in another way than a config does.
    """

    kind: ClassVar[str]
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
        plugin, slash, _ = self.component.partition("/")
        is_plugin = slash and ":" not in self.component and plugin != "core"
        context = ResolutionContext(PluginManager.load([plugin] if is_plugin else []))
        try:
            return Place(context.manager.kinds[self.kind]).select({"type": self.component, **self.settings}, context)
        except RejectedError as error:
            words = "; ".join("\n  ".join((problem.message, *problem.hints)) for problem in error.problems)
            raise AssertionError(f"a config cannot choose {self.component}: {words}") from error
