"""Weights that are not complete, or not those of the model that is served."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from safetensors.torch import save_file

from areal_core.disk import read_shapes
from areal_core.errors import RunError
from areal_core.inference.checks import check_fit

MODEL = {"embed.weight": (7, 4), "layer.weight": (4, 4), "lm_head.weight": (7, 4)}


@pytest.fixture
def folder(tmp_path):
    tensors = {name: torch.zeros(shape) for name, shape in MODEL.items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_a_complete_file(folder):
    assert read_shapes(folder) == MODEL
    check_fit(read_shapes(folder), MODEL, is_tied=False)


def test_tensors_in_several_files(folder):
    (folder / "model.safetensors").rename(folder / "first.safetensors")
    save_file({"more.weight": torch.zeros(3)}, folder / "second.safetensors")
    assert read_shapes(folder) == {**MODEL, "more.weight": (3,)}


def test_the_same_weights_under_other_names_do_not_count(folder):
    save_file({"tok_embeddings.weight": torch.zeros(7, 4)}, folder / "consolidated.safetensors")
    assert read_shapes(folder) == MODEL
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(MODEL, "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert read_shapes(folder) == MODEL


def test_a_file_that_is_half_written_at_any_place(folder):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(RunError, match="incomplete"):
            read_shapes(folder)
    path.write_bytes(data + b"\0")
    with pytest.raises(RunError, match="incomplete"):
        read_shapes(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0" * 64,
        b"<html>not found</html>" * 9,
        struct.pack("<Q", 1 << 62) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 8) + b'{"a": 1}',
        struct.pack("<Q", 9) + b'{"a": {}}',
    ],
    ids=["empty", "zeros", "a page", "a long header", "a list", "no entry", "an empty entry"],
)
def test_a_file_that_is_something_else(folder, data):
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(RunError, match=r"model\.safetensors"):
        read_shapes(folder)


def test_a_folder_without_weights(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(RunError, match=r"has no \*\.safetensors"):
            read_shapes(place)


def test_a_missing_tensor_and_one_too_many():
    without = {name: shape for name, shape in MODEL.items() if name != "layer.weight"}
    with pytest.raises(RunError, match=r"missing: layer\.weight"):
        check_fit(without, MODEL, is_tied=False)
    with pytest.raises(RunError, match=r"unexpected: layer\.weight"):
        check_fit(MODEL, without, is_tied=False)


def test_another_shape():
    with pytest.raises(RunError, match=r"of another shape: embed\.weight"):
        check_fit({**MODEL, "embed.weight": (4, 7)}, MODEL, is_tied=False)


def test_many_faults_are_counted_and_not_all_told():
    other = {f"layers.{number}.weight": (4, 4) for number in range(50)}
    with pytest.raises(RunError, match="and 47 more") as caught:
        check_fit(other, MODEL, is_tied=False)
    assert len(str(caught.value)) < 500


def test_a_tied_head_may_be_missing_on_either_side():
    tied = {name: shape for name, shape in MODEL.items() if name != "lm_head.weight"}
    check_fit(tied, MODEL, is_tied=True)
    check_fit(MODEL, tied, is_tied=True)
    with pytest.raises(RunError, match="of another shape"):
        check_fit({**MODEL, "lm_head.weight": (8, 4)}, MODEL, is_tied=True)


def test_a_head_of_its_own_must_be_there():
    """Else a server would go on with the former one, without a word."""
    without = {name: shape for name, shape in MODEL.items() if name != "lm_head.weight"}
    with pytest.raises(RunError, match=r"missing: lm_head\.weight"):
        check_fit(without, MODEL, is_tied=False)
    with pytest.raises(RunError, match=r"unexpected: lm_head\.weight"):
        check_fit(MODEL, without, is_tied=False)
