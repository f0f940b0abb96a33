"""areal: asynchronous reinforcement learning for language models, a small core and plugins.

Nothing is imported here, so that `areal --help` and every plugin's record module stay cheap. Start reading at
`areal_core.plugins` (how the parts are found), `areal_core.config` (how a run is described) and `areal_core.runs.roles`
(how the parts are put together).
"""

__version__ = "0.1.0"
