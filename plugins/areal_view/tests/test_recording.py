"""The texts of tokens, what is missing, and that a long run stays small."""

from __future__ import annotations

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from areal_core.data import Generation, PackedBatch, Trajectory, shift_to_predictions
from areal_core.data.trajectory import FinishReason
from areal_view.recording import thin_out, token_texts, write_step
from areal_view.rollouts import read_index, read_step, steps_of


class ByteTokenizer:
    """A token is a byte, as the tokens of rare letters are; 256 is the word ` the` of a SentencePiece."""

    def decode(self, ids):
        return b"".join(bytes([i]) if i < 256 else b"the" for i in ids).decode(errors="replace")

    def convert_ids_to_tokens(self, ids):
        return ["▁the" if i == 256 else chr(i) for i in ids]


def test_letters_of_several_tokens_stand_with_the_first():
    ids = [*"né€x".encode(), 256, 0xFF, ord("a"), *"日本".encode()]
    texts = token_texts(ids, [0], ByteTokenizer())
    assert texts[:7] == ["n", "é", "", "€", "", "", "x"]
    assert texts[7:10] == [" the", "\ufffd", "a"]
    assert texts[10:] == ["日", "", "", "本", "", ""]


def test_a_stray_byte_spoils_no_other_letter():
    ids = [0xE6, *"日本".encode(), 0xE6, 0xE6, ord("a")]
    texts = token_texts(ids, [0], ByteTokenizer())
    assert texts == ["\ufffd", "日", "", "", "本", "", "", "\ufffd", "\ufffd", "a"]


def batch_of(*lengths):
    trajectories = []
    for number, length in enumerate(lengths):
        generation = Generation([65 + n for n in range(length)], [-0.5] * length, [3] * length, FinishReason.STOP)
        one = Trajectory.from_generation([97, 98], generation)
        one.sequence |= {"reward": np.float32(number), "group_id": np.int64(7), "sample_index": np.int64(number)}
        one.check()
        trajectories.append(one)
    batch = shift_to_predictions(PackedBatch.from_trajectories(trajectories))
    values = torch.arange(batch.token_count, dtype=torch.float32)
    return batch.with_tokens(advantages=values.clone(), loss=torch.full_like(values, torch.nan))


def test_values_stand_with_the_token_that_they_are_of(tmp_path):
    write_step(tmp_path, 4, batch_of(2, 3), ByteTokenizer())
    first, second = read_step(tmp_path, 4)
    assert (first["text"], second["text"]) == (["a", "b", "A", "B"], ["a", "b", "A", "B", "C"])
    assert (first["turn"], second["turn"]) == ([-1, -1, 0, 0], [-1, -1, 0, 0, 0])
    # Place t of a shifted batch is of the token behind it: 0 to 2 of the first sequence, 4 to 7 of the second.
    assert (first["columns"]["advantages"], second["columns"]["advantages"]) == ([None, 0, 1, 2], [None, 4, 5, 6, 7])
    assert first["columns"]["versions"] == [-1, -1, 3, 3]
    assert first["columns"]["loss_mask"] == [0, 0, 1, 1]
    assert first["columns"]["loss"] == [None] * 4
    line = read_index(tmp_path, 4)[1]
    assert (line["prompt"], line["answer"], line["length"], line["reward"]) == ("ab", "ABC", 3, 1.0)
    assert (line["finish_reason"], line["turns"], line["advantage"]) == ("stop", 1, 6.0)
    assert pq.read_table(tmp_path / "rollouts" / "step-000004.parquet")["token_id"].to_pylist()[2:4] == [65, 66]


@pytest.mark.parametrize("count", [1, 2, 7, 40, 1000])
def test_a_folder_over_its_bound_is_thinned_and_keeps_its_last(tmp_path, count):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for step in range(1, count + 1):
        (folder / f"step-{step:06d}.parquet").write_bytes(b"x" * 100)
        thin_out(tmp_path, 1000)
    kept = steps_of(tmp_path)
    assert kept[-1] == count
    assert min(count, 5) <= len(kept) <= 10
    gaps = [after - before for before, after in zip([0, *kept], kept, strict=False)]
    assert max(gaps) <= 4 * count / len(kept), "what is left is spread over the whole run"
