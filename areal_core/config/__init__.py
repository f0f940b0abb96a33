"""Config: how a run is described, checked and explained. This package imports no torch.

`resolve` reads a YAML file or a preset, lays the environment and the command line over it, loads the plugins that are
named anywhere in it, and validates each section with the model that its plugin ships. What comes out is a `Resolved`:
the frozen `RunConfig`, where each value came from, and a complete YAML text from which every process of the run reads
the same config again with `load_run`. Neither imports code of the user's: a component that is named by import is found
and hashed, and its settings are read in the preflight and where it is used (`selection`).

A plugin's settings are a model derived from `Settings`; a field in which the reader chooses a part is declared with
`component(kind)` and holds a `Selection`:

    class Mine(Settings):
        clip: float = Field(default=0.2, gt=0, description="half width of the interval of unclipped ratios")
        advantage: Selection = component("advantages", default="group_normalized")

A bare name in such a default means the plugin's own component of that name, whatever other plugins are loaded. A path
is annotated `LocalPath`: it is relative to the config that names it. A span of time is annotated `Seconds`.
"""

from areal_core.config.context import LocalPath
from areal_core.config.launching import LauncherSettings
from areal_core.config.needs import needs_of, roles_of
from areal_core.config.place import component
from areal_core.config.resolve import CONFIG_FILE, Resolved, load_run, resolve
from areal_core.config.run_config import RunConfig
from areal_core.config.sections import EvaluationSection, RewardTerm, ServerBounds
from areal_core.config.selection import Selection, selections
from areal_core.config.settings import NoSettings, Seconds, Secret, Settings, public_environment
from areal_core.config.yaml_text import parse_yaml

__all__ = [
    "CONFIG_FILE",
    "EvaluationSection",
    "LauncherSettings",
    "LocalPath",
    "NoSettings",
    "Resolved",
    "RewardTerm",
    "RunConfig",
    "Seconds",
    "Secret",
    "Selection",
    "ServerBounds",
    "Settings",
    "component",
    "load_run",
    "needs_of",
    "parse_yaml",
    "public_environment",
    "resolve",
    "roles_of",
    "selections",
]
