"""Parts of programs that start runs, read them, or generate and score as a run does.

    commands      arguments and output of the `areal` command
    runs          `RunFolder` and the files in it; `execute` runs a config
    models        the model and the tokenizer of a config
    evaluation    an `Evaluator` plays the episodes of held-out prompts

Most programs need only `areal_core.train` and `areal_core.open_run`. This module is for plugins with commands.
`examples/programs` has complete programs.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
