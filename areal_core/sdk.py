"""The interfaces of components for tasks and algorithms: one name for each idea.

    tasks         Reward, RolloutWorkflow, Environment, Agent, Tool, Sandbox, Dataset, Tracker, and their records
    algorithms    Algorithm, the parts that `PolicyGradientSettings` composes, and their records

`areal_core.data` has trajectories, batches and metrics, `areal_core.config` the settings of components, and
`areal_core.chat` conversations. docs/extend/components.md has an example of each kind.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
