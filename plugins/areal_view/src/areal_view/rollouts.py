"""The tokens of a few groups of each step, with what the losses made of them: a Parquet file a step in `rollouts/`.

A row is a token: `pandas.read_parquet("RUN_DIR/rollouts")` and `polars.read_parquet("RUN_DIR/rollouts/*.parquet")` have
them all. What is known of its sequence stands in every row, which Parquet stores once. Numbers of a token that no loss
has seen, as the first of a sequence, are missing (null).
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

FOLDER: Final = "rollouts"
HARDWARE_FILE: Final = "hardware.txt"
INDEX: Final = b"areal"
"""In a file's schema: its sequences, so that a list of them needs no token."""
INDEXED: Final = (
    *("step", "group_id", "sample_index", "part_index", "agent", "turns", "reward", "length", "finish_reason"),
    *("advantage", "prompt", "answer"),
)
"""What the index says of each sequence."""
WHOSE: Final = ("group_id", "sample_index", "part_index", "agent_id")
"""Of which sequence a token is, by the names that a batch has for it."""
NOT_NUMBERS: Final = frozenset({"step", *WHOSE, "data_row", "finish_reason", "position", "token_id", "text", "turn"})
"""Columns that tell which token it is, not what was computed for it."""
COLUMNS: Final[dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("static").joinpath("columns.json").read_text()
)
"""Of the numbers of a token: name and meaning. What else an algorithm logs for each token comes behind them."""
RATIOS: Final = {
    "behavior_log_ratio": ("proximal_logprobs", "behavior_logprobs"),
    "proximal_log_ratio": ("logprobs", "proximal_logprobs"),
}
"""Differences that the page shows beside the columns."""


def steps_of(run_dir: Path) -> list[int]:
    """The steps that have a file, in order."""
    names = (path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(run_dir: Path, step: int) -> Path:
    """The file of a step."""
    return run_dir / FOLDER / f"step-{step:06d}.parquet"


def token_count(run_dir: Path, step: int) -> int:
    """How many tokens the file of a step has."""
    return int(pq.read_metadata(path_of(run_dir, step)).num_rows)


def read_index(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The sequences of a step: whose they are, reward, length, the first letters.

    Raises:
        OSError, ValueError, LookupError: the file is gone, damaged or of another version; so do the other functions.
    """
    found = json.loads(pq.read_schema(path_of(run_dir, step)).metadata[INDEX])
    return [{key: one[key] for key in INDEXED} for one in found]


def read_step(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """The sequences of a step as the page takes them: text, turn and columns of their tokens, None where missing."""
    # `read_table` and `to_numpy` would import pandas.
    table = pq.ParquetFile(path_of(run_dir, step)).read()
    values = {name: column.to_pylist() for name, column in zip(table.column_names, table.columns, strict=True)}
    for name, (above, below) in RATIOS.items():
        if above in values and below in values:
            both = zip(values[above], values[below], strict=True)
            values[name] = [None if a is None or b is None else a - b for a, b in both]
    numbers = [name for name in values if name not in NOT_NUMBERS and name.split(".")[0] != "reward"]
    starts = [place for place, position in enumerate(values["position"]) if not position] + [table.num_rows]
    found = []
    for line, start, end in zip(read_index(run_dir, step), starts, starts[1:], strict=False):
        about = {key: line[key] for key in ("step", *WHOSE[:3], "agent", "reward", "finish_reason")}
        tokens = {key: values[key][start:end] for key in ("text", "turn")}
        columns = {name: [_short(value) for value in values[name][start:end]] for name in numbers}
        found.append(about | tokens | {"columns": columns})
    return found


def _short(value: Any) -> Any:
    """A number in six digits, or the word for one that is infinite; a truth as 0 or 1; None for what is not known."""
    if type(value) is not float:
        return int(value) if type(value) is bool else value
    return float(f"{value:.6g}") if math.isfinite(value) else None if math.isnan(value) else str(value)
