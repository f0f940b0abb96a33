"""Runs from Python: start one, read its results, and resume it.

run = areal_core.train(model="Qwen/Qwen2.5-0.5B-Instruct", dataset=rows, rewards=[correct], algorithm="grpo")

    train    `start.py`      arguments, functions and rows become a config file; `areal run` runs it in a process
    Run      `run.py`        metrics, samples and model of a run folder
             `functions.py`  the names of functions: `file:attr`, or a pickle in the run folder
             `rows.py`       rows that a call was given
"""

from areal_core.library.rows import Rows as Rows
from areal_core.library.run import Run, open_run
from areal_core.library.start import train
from areal_core.library.table import Table

__all__ = ["Run", "Table", "open_run", "train"]
