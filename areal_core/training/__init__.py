"""The synchronous half of a run, which every rank of the trainer runs (SPMD). `loop` is the page to begin with.

    loop            one step after another: wait, train, sync, evaluate, checkpoint
    source          batches for all ranks, from `rollout_client` (read by `batches`) or from `examples`
    learner         trains on a batch, with `context` for the algorithm; `token_log` records a few of its tokens
    weight_sync     new weights for the servers: by `broadcast`, by `ipc`, or through a folder (`weights_file`)
    evaluation      evaluations and their states; `exports` writes the best and the last model
    checkpointer    when a checkpoint is made, within `host_memory`; `checkpoint` has its files, `state` its contents
    metrics_logger  metrics to the run folder, trackers and plugins
    collectives     operations of all ranks together
    resume_hints    advice for a damaged checkpoint; without torch, for the driver

The main rank sends its requests to the rollout controller, which manages the inference servers. Only the transports
`broadcast` and `ipc` exchange tensors with servers directly.
"""
