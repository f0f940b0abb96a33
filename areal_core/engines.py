"""What training engines, model sources and weight transports are written against.

    engine        `TrainEngine`, and what an engine may do besides: adapters, snapshots, updates of some parameters
    models        where a model is (`ModelReference`), what its files hold (`StoredModel`), who makes it (`ModelSource`)
    transports    `WeightTransport`, its `RolloutConnection`, and the tensors that trainers and servers exchange

`areal_core.models` reads Hugging Face models, `areal_core.data` has batches, `areal_core.servers` the other side.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
