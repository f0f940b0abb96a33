"""Parts of code that runs in a process of a run: background work, waits, connections, addresses.

background      `start_task` and `start_thread`: work whose failure ends the process with its cause, or is
                handled by the function that `on_failure` sets
waits           `polls` and `polls_async`: a deadline and progress messages for every wait
connections     `serve`, `connect` and `Peer`: messages between processes, of classes derived from `Message`
this process    `Member`: the process in its run. `run_role` is the main function of a role of a plugin
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
