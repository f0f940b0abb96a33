"""What inference engines and adapters for inference servers are written against.

Most engines are a `ServerFleet` with a `ServerAdapter` for one kind of server. `HTTPAdapter` is the base of adapters
that speak HTTP. docs/extend/server.md has an example that runs.

    interface     `InferenceEngine`, its requests, and the slots that its requests take
    fleet         `ServerFleet`, its settings, and one of its servers (`InferenceServer`)
    adapter       `ServerAdapter`, what it is asked and what it answers, and its errors
    outside runs  `DriverConnection` and its messages, for a program that starts servers without a run
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
