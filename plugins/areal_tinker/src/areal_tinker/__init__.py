"""The Tinker API on your own GPUs: `areal tinker serve`.

A client with the Tinker SDK writes the training loop; this server has the model. What a request does:

    api.py          HTTP: reads the request, answers with the name of a future; the SDK then asks for the result
    journal.py      SQLite: each training call once, by model and `seq_id`, and its result
    training.py     executes the calls of a model in their order; brings a model back after a restart
    ranks.py        the training engine on all ranks
    losses.py       the losses that Tinker defines
    sampling.py     generates with the weights of a sampling session
    wire.py         protobuf messages of the SDK to batches of tokens, and back
    service.py      the process that has all of these; started by the driver
    serve.py        the command: starts the driver, and starts again what was lost
"""
