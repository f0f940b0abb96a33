"""The interface of launchers, which start and kill the processes of a run where the driver places them.

    interface     `Launcher`, `RunningGroup`, and the process groups, nodes and places of the driver
    members       `member_environment` has the variables that name a member; `spawn` starts members on this machine

`areal_core.config.LauncherSettings` is the base of their settings, `areal_core.processes` has connections and waits.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
