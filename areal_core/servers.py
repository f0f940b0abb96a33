"""What inference engines and adapters for inference servers are written against.

Write a `ServerAdapter` for a kind of inference server; `HTTPAdapter` is the base of adapters that speak HTTP. A config
names the adapter as its inference engine, and a run puts it behind a `ServerFleet`. docs/extend/server.md has an
example that runs. An engine without servers derives from `InferenceEngine`.

    interface     `InferenceEngine`, its requests, and the slots that its requests take
    fleet         `ServerFleet` and its settings
    adapter       `ServerAdapter`, what it is asked and what it answers, and its errors
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
