"""What programs are built from that start runs, read them, or generate and score as a run does.

    commands      arguments and output of the `areal` command
    runs          `RunFolder` and what is in it; `execute` runs a config
    models        the model and the tokenizer of a config
    evaluation    an `Evaluator` plays the episodes of held-out prompts

`areal_core.train` and `areal_core.open_run` are what most programs need: this module is for plugins with commands.
"""

from areal_core.exports import from_stub

__all__, __dir__, __getattr__ = from_stub(__name__, __file__)
