"""Tokens of a few groups of each step, with the values that the losses computed for them.

There is a Parquet file for each step in `rollouts/`. Read all of them with `pandas.read_parquet("RUN_DIR/rollouts")` or
`polars.read_parquet("RUN_DIR/rollouts/*.parquet")`. A row is a token. Values of its sequence are repeated in every row,
which Parquet compresses. Values that no loss has computed, such as those of a sequence's first token, are null.
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
"""Key in a file's schema that holds the index: its sequences, so that they can be listed without reading tokens."""
INDEXED: Final = (
    *("step", "group_id", "sample_index", "part_index", "agent", "turns", "reward", "length", "finish_reason"),
    *("advantage", "prompt", "answer"),
)
"""Fields of each sequence in the index."""
SEQUENCE_KEYS: Final = ("group_id", "sample_index", "part_index", "agent_id")
"""Columns that identify the sequence of a token, by their names in a batch."""
NOT_NUMBERS: Final = frozenset(
    {"step", *SEQUENCE_KEYS, "data_row", "finish_reason", "position", "token_id", "text", "turn"}
)
"""Columns that identify or spell a token, in contrast to values that were computed for it."""
COLUMNS: Final[dict[str, list[str]]] = json.loads(
    Path(__file__).with_name("static").joinpath("columns.json").read_text()
)
"""Name and meaning of the values of a token. Other values that an algorithm logs come after these."""
RATIOS: Final = {
    "behavior_log_ratio": ("proximal_logprobs", "behavior_logprobs"),
    "proximal_log_ratio": ("logprobs", "proximal_logprobs"),
}
"""Differences of two columns that the page shows in addition."""


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps that have a file, in ascending order."""
    names = (path.stem.removeprefix("step-") for path in (run_dir / FOLDER).glob("step-*.parquet"))
    return sorted(int(name) for name in names if name.isdecimal())


def path_of(run_dir: Path, step: int) -> Path:
    """Return the path of a step's file."""
    return run_dir / FOLDER / f"step-{step:06d}.parquet"


def token_count(run_dir: Path, step: int) -> int:
    """Return the number of tokens in a step's file."""
    return int(pq.read_metadata(path_of(run_dir, step)).num_rows)


def read_index(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the index of a step's file; see `INDEXED`.

    Raises:
        OSError, ValueError, LookupError: the file is missing, damaged or of another version.
    """
    index = json.loads(pq.read_schema(path_of(run_dir, step)).metadata[INDEX])
    return [{key: sequence[key] for key in INDEXED} for sequence in index]


def read_step(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the sequences of a step for the page: text, turn and values of their tokens, with None for null.

    Raises:
        OSError, ValueError, LookupError: see `read_index`.
    """
    # `read_table` and `to_numpy` would import pandas.
    table = pq.ParquetFile(path_of(run_dir, step)).read()
    values = {name: column.to_pylist() for name, column in zip(table.column_names, table.columns, strict=True)}
    for name, (above, below) in RATIOS.items():
        if above in values and below in values:
            both = zip(values[above], values[below], strict=True)
            values[name] = [None if a is None or b is None else a - b for a, b in both]
    numbers = [name for name in values if name not in NOT_NUMBERS and name.split(".")[0] != "reward"]
    starts = [index for index, position in enumerate(values["position"]) if not position] + [table.num_rows]
    sequences = []
    for line, start, end in zip(read_index(run_dir, step), starts, starts[1:], strict=False):
        header = {key: line[key] for key in ("step", *SEQUENCE_KEYS[:3], "agent", "reward", "finish_reason")}
        tokens = {key: values[key][start:end] for key in ("text", "turn")}
        columns = {name: [_short(value) for value in values[name][start:end]] for name in numbers}
        sequences.append(header | tokens | {"columns": columns})
    return sequences


def _short(value: Any) -> Any:
    """Return a number with six digits, an infinite one as text, a bool as 0 or 1, and None for NaN."""
    if type(value) is not float:
        return int(value) if type(value) is bool else value
    if math.isnan(value):
        return None
    return float(f"{value:.6g}") if math.isfinite(value) else str(value)
