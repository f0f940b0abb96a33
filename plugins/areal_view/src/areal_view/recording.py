"""Write the files of `rollouts/`; runs in the trainer."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from areal_core.config import load_run
from areal_core.data import FinishReason
from areal_core.programs import RunFolder, load_tokenizer, model_reference
from areal_view.rollouts import HARDWARE_FILE, INDEX, SEQUENCE_KEYS, path_of, steps_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from areal_core.data import PackedBatch

MAX_BYTES: Final = 256 << 20
"""Limit in bytes of all files of a run. Above it files are removed, evenly over the run."""
CHECK_EVERY: Final = 32
"""Steps between checks of the total size, because there may be thousands of files."""
LEFT_OUT: Final = frozenset({"input_ids", "targets", "turn_ids"})
"""Columns of a batch that are not written, or under another name."""
MAX_TOKENS_OF_A_CHARACTER: Final = 4
"""Number of tokens that one character may be split into: no character has more bytes in UTF-8."""
SHOWN: Final = 300
"""Characters of the end of a prompt, and of the start of an answer, in the index."""


_tokenizers: dict[Path, Any] = {}


def log_batch(run_dir: Path, step: int, batch: PackedBatch) -> None:
    """Write the file of a step. If the disk is full, the step is skipped."""
    if run_dir not in _tokenizers:
        _tokenizers[run_dir] = load_tokenizer(model_reference(load_run(run_dir), RunFolder(run_dir)))
        _begin(run_dir, step)
    with suppress(OSError):
        write_step(run_dir, step, batch, _tokenizers[run_dir])


def _begin(run_dir: Path, step: int) -> None:
    """Remove files of steps that a resume has discarded, and write the trainer's hardware for the head of the page."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else f"{os.cpu_count()} CPU cores"
    text = f"{os.environ.get('WORLD_SIZE', '1')} x {name}, torch {torch.__version__}\n"
    with suppress(OSError):
        for later in steps_of(run_dir):
            if later >= step:
                path_of(run_dir, later).unlink()
        (run_dir / HARDWARE_FILE).write_text(text, encoding="utf-8")


def write_step(run_dir: Path, step: int, batch: PackedBatch, tokenizer: Any) -> None:
    """Write the file of a step, replacing an older one, and remove files above the size limit.

    Args:
        run_dir: folder of the run.
        step: step of the batch.
        batch: batch from the hook `areal_batch_logged`.
        tokenizer: tokenizer of the policy.
    """
    path = path_of(run_dir, step)
    path.parent.mkdir(exist_ok=True)
    columns = token_columns(step, batch, tokenizer)
    index = {INDEX: json.dumps(sequences_of(columns, batch.lengths.tolist()))}
    table = pa.table({name: arrow_of(values) for name, values in columns.items()})
    hidden = path.with_name(f".{path.name}")
    pq.write_table(table.replace_schema_metadata(index), hidden, compression="zstd")
    hidden.replace(path)
    if step % CHECK_EVERY == 0:
        thin_out(run_dir)


def arrow_of(values: Any) -> pa.Array:
    """Return a column of numbers, bools or texts; NaN becomes null. `pyarrow.array` would import pandas."""
    if isinstance(values, list):
        texts = [value.encode() for value in values]
        ends = np.cumsum([0, *map(len, texts)], dtype=np.int32)
        return pa.Array.from_buffers(
            pa.string(), len(values), [None, pa.py_buffer(ends.tobytes()), pa.py_buffer(b"".join(texts))]
        )
    if values.dtype == bool:
        return pa.Array.from_buffers(pa.bool_(), len(values), [None, _bits(values)])
    valid = _bits(~np.isnan(values)) if values.dtype.kind == "f" else None
    kind = pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(np.ascontiguousarray(values))])


def _bits(values: np.ndarray[Any, Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def thin_out(run_dir: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove files of a run until all together have at most `max_bytes`.

    Files of odd steps go first, then those whose step is not a multiple of four, and so on, but never the last one. So
    the remaining files are spread over the run.
    """
    sizes = {step: path_of(run_dir, step).stat().st_size for step in steps_of(run_dir)}
    stride = 2
    while len(sizes) > 1 and sum(sizes.values()) > max_bytes:
        for step in [step for step in [*sizes][:-1] if step % stride]:
            path_of(run_dir, step).unlink()
            del sizes[step]
        stride *= 2


def token_columns(step: int, batch: PackedBatch, tokenizer: Any) -> dict[str, Any]:
    """Return the columns of a step by name, each with one value for each of the T tokens.

    A batch stores most values at the position before the token that they belong to; here they are moved to the token.
    """
    lengths = batch.lengths
    starts = batch.tokens.offsets[:-1].numpy()
    ids = batch["input_ids"].tolist()

    def of_tokens(values: torch.Tensor, missing: float) -> np.ndarray[Any, Any]:
        moved = np.roll(values.numpy(), 1)
        moved[starts] = missing
        return moved

    def of_sequences(values: torch.Tensor) -> Any:
        return torch.repeat_interleave(values, lengths).numpy()

    fields = batch.sequences
    columns: dict[str, Any] = {"step": np.full(len(ids), step, np.int32)}
    for key in SEQUENCE_KEYS:
        columns[key] = of_sequences(fields.get(key, torch.zeros(len(batch), dtype=torch.int64)))
    if "prompt_id" in fields:
        columns["data_row"] = of_sequences(fields["prompt_id"][:, 0])
    if "finish_reason" in fields:
        names = [FinishReason(reason).name.lower() for reason in fields["finish_reason"].tolist()]
        columns["finish_reason"] = np.repeat(names, lengths.numpy()).tolist()
    columns |= {key: of_sequences(fields[key]) for key in sorted(fields) if key.split(".")[0] == "reward"}
    columns["position"] = np.arange(len(ids)) - of_sequences(batch.tokens.offsets[:-1])
    columns["token_id"] = np.array(ids)
    columns["text"] = token_texts(ids, starts.tolist(), tokenizer)
    turns = batch.tokens.values.get("turn_ids", torch.full((len(ids),), -1))
    columns["turn"] = of_tokens(turns, -1)
    for name, values in batch.tokens.values.items():
        if name not in LEFT_OUT | columns.keys():
            missing = np.nan if values.is_floating_point() else -1 if name == "versions" else 0
            columns[name] = of_tokens(values, missing)
    return columns


def token_texts(ids: Sequence[int], starts: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text of each token. If several make one character, the first has it and the others are empty."""
    unique_ids = [*dict.fromkeys(ids)]
    pieces = dict(zip(unique_ids, tokenizer.convert_ids_to_tokens(unique_ids), strict=True))
    single = {id_: tokenizer.decode([id_]) for id_ in unique_ids}
    # Decoding a single token drops the leading space that SentencePiece marks with "▁".
    single |= {
        id_: f" {single[id_]}" for id_ in unique_ids if str(pieces[id_]).startswith("▁") and single[id_][:1] != " "
    }
    texts = [single[id_] for id_ in ids]
    begins = {*starts}
    first_free = 0
    for index, text in enumerate(texts):
        if index in begins or "\ufffd" not in text:
            first_free = index + ("\ufffd" not in text)
        for first in range(max(first_free, index - MAX_TOKENS_OF_A_CHARACTER + 1), index):
            whole = tokenizer.decode(ids[first : index + 1])
            if "\ufffd" not in whole:
                texts[first : index + 1] = [whole, *[""] * (index - first)]
                first_free = index + 1
                break
    return texts


def sequences_of(columns: dict[str, Any], lengths: Iterable[int]) -> list[dict[str, Any]]:
    """Return the index entries of a step's sequences; see `INDEXED`."""
    sequences, start = [], 0
    for length in lengths:
        part, start = slice(start, start + length), start + length
        turns = columns["turn"][part]
        text, sampled = columns["text"][part], turns >= 0
        first = int(sampled.argmax()) if sampled.any() else length
        advantages = columns.get("advantages", np.full(start, np.nan))[part][sampled]
        agent = int(columns["agent_id"][start - 1])
        sequences.append(
            {name: int(columns[name][start - 1]) for name in ("step", *SEQUENCE_KEYS[:3])}
            | {
                "agent": f"{agent & 0xFFFF:04x}" if agent else "",
                "turns": int(turns.max()) + 1,
                "reward": float(columns["reward"][start - 1]) if "reward" in columns else None,
                "length": int(sampled.sum()),
                "finish_reason": str(columns["finish_reason"][start - 1]) if "finish_reason" in columns else "",
                "advantage": float(np.nanmean(advantages)) if np.isfinite(advantages).any() else None,
                "prompt": "".join(text[:first])[-SHOWN:],
                "answer": "".join(text[first:])[:SHOWN],
            }
        )
    return sequences
