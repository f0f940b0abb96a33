"""Checks before a run: everything that can be wrong is reported before a process starts or a file is written.

`areal run`, `areal run --dry-run` and `areal run --resume` call `preflight`. Its result is one object, `Preflight`: the
plan that the dry run prints, the notes that the run logs, and the records that a resume compares. Two processes work on
it at the same time:

    the driver, without torch and without the user's code       a child process, `python -m areal_core.checks.child`
    ------------------------------------------------------      ----------------------------------------------------
                                                                reading      imports the user's own components, and
                                                                             validates the config with their settings
    reading     adopts these settings, or raises the problems
                with file and line
    models      config.json, headers of the weights; asks       components   imports every component of the config and
                each component's settings `check_model`                      compares signatures with settings
    plan        memory, batches, weight sync, groups            loading      loads the tokenizers; loads the weights by
    disk_space  room for checkpoints and the export                          shape, as transformers does (torch, meta)
                                                                data         reads rows of each data set once: keys, and
                                                                             `check_row` or the example tokenizer
                                                                rewards      compares arguments with keys of rows; calls
                                                                             the user's own rewards on the first rows
                                                                reward_imports    imports these in a process without
                                                                             secrets, as in a run
                                                                algorithm_trial   computes the user's own losses and
                                                                             advantages on a made-up batch (torch)
                                                                findings     what the child reports to the driver
                         preflight   starts the child, joins both halves, raises one error with all problems
                         fingerprints   hashes of plugins, files, modules, data and models: what a run consists of, and
                                        what has changed when it is resumed

The child writes `Reading` and `Findings` as plain data; nothing that it imports, and no crash of it, reaches the
driver. If the components of plugins and the models show no problem, it stores this in the cache folder (`memory`). The
next child with the same config, machine, environment and files skips them. It imports and tries the user's own
components every time.

Other programs call a part:

    read_settings      `areal config` and `areal serve`: a child that reads the settings and ends. Its result is stored,
                       so that a config whose files have not changed imports nothing.
    check_model        `areal config check`: models that are on this machine. No child.
    check_made_model   Called after a model is downloaded or created. Checks the model, then the rows with its
                       tokenizer.
    check_evaluation   `areal eval`: models and data sets, in its own process.
    doctor             `areal doctor`: asks every health check in a process of its own. `machine` and `model_folder`
                       have the core's own health checks.
"""
