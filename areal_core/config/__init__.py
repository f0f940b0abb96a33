"""Read, check and explain the config of a run. This package imports no torch.

`resolve` reads a YAML file or a preset and merges the environment and the command line into it. It loads every plugin
that the config names, and validates each section with the settings model that its plugin ships. It returns a
`Resolved`: the frozen `RunConfig`, the origin of each value, and a complete YAML text. Every process of the run reads
the same config from this text with `load_run`.

Neither function imports the user's own code. They find and hash the component that a config names by import. The
preflight and the process that uses the component read its settings (`selection`).

A plugin derives its settings from `Settings`. `component(kind)` declares a field in which the reader of a config
chooses a component. The field holds a `Selection`:

    class Mine(Settings):
        clip: float = Field(default=0.2, gt=0, description="Clip range: ratios outside 1 ± clip are clipped.")
        advantage: Selection = component("advantages", default="group_normalized")

A bare name in such a default means the plugin's own component of that name, even if another plugin has one, too.
Annotate a path with `LocalPath`: it is relative to the folder of the config that names it. Annotate a duration with
`Seconds`.
"""

from areal_core.config.context import LocalPath
from areal_core.config.launching import LauncherSettings
from areal_core.config.needs import needs_of, roles_of
from areal_core.config.place import component, select
from areal_core.config.resolve import Resolved, load_run, resolve
from areal_core.config.run_config import RunConfig
from areal_core.config.schema import component_schema
from areal_core.config.sections import EvaluationSection, ServerBounds
from areal_core.config.selection import Selection, selections
from areal_core.config.settings import NoSettings, Seconds, Secret, Settings, public_environment
from areal_core.config.yaml_text import parse_yaml

__all__ = [
    "EvaluationSection",
    "LauncherSettings",
    "LocalPath",
    "NoSettings",
    "Resolved",
    "RunConfig",
    "Seconds",
    "Secret",
    "Selection",
    "ServerBounds",
    "Settings",
    "component",
    "component_schema",
    "load_run",
    "needs_of",
    "parse_yaml",
    "public_environment",
    "resolve",
    "roles_of",
    "select",
    "selections",
]
