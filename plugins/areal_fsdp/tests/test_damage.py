"""Errors for damaged weights and checkpoints name the problem in one line."""

import re
import shutil

import pytest
from safetensors.torch import load_file, save_file

from areal_core.errors import RunError


def rewritten(source, target, change):
    """Copy a model's folder with changed tensors."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def test_a_tensor_that_holds_nan_is_named(make_engine, model_folder, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def spoil(tensors):
        tensors[name][3, 2] = float("nan")

    with pytest.raises(RunError, match=f"cannot be loaded: its tensor '{name}' holds NaN or infinity"):
        make_engine(rewritten(model_folder(), tmp_path / "spoilt", spoil))


@pytest.mark.parametrize(
    ("value", "words"), [(float("nan"), "holds NaN or infinity"), (1e30, "or its adapter, overflows")]
)
def test_a_damaged_adapter_is_not_called_a_damaged_model(make_engine, adapter_folder, tmp_path, value, words):
    folder = tmp_path / "adapter"
    shutil.copytree(adapter_folder(), folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    for tensor in tensors.values():
        tensor.fill_(value)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(RunError, match=words) as raised:
        make_engine(adapter={"from_folder": folder})
    assert "download it again" not in str(raised.value)
    assert "soft-capped" not in str(raised.value)


def test_the_error_for_another_shape_names_both_shapes(make_engine, model_folder, tmp_path):
    name = "model.layers.1.mlp.up_proj.weight"

    def cut(tensors):
        tensors[name] = tensors[name][:-1].contiguous()

    with pytest.raises(RunError) as raised:
        make_engine(rewritten(model_folder(), tmp_path / "cut", cut))
    found = re.search(
        r": '(.*)' has shape \[(\d+), (\d+)\] in its files, .* needs \[(\d+), (\d+)\]$", raised.value.message
    )
    assert found, raised.value.message
    assert found[1] == name
    assert (int(found[2]) + 1, found[3]) == (int(found[4]), found[5])


def test_an_export_that_would_fail_fails_at_setup(make_engine, model_folder, tmp_path):
    """Setup reads the tokenizer and writes the generation config only for this check."""
    folder = tmp_path / "model"
    shutil.copytree(model_folder(), folder)
    (folder / "tokenizer.json").write_text("{")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    with pytest.raises(RunError, match=r"a trial export of '.*model' failed"):
        make_engine(folder, is_exported=True)
    make_engine(folder)  # a role that no run exports, such as a critic, needs no files for it


def test_the_error_for_a_damaged_checkpoint_is_one_line(make_engine, tmp_path):
    engine = make_engine()
    for name in (".metadata", "__0_0.distcp"):
        engine.save(tmp_path / name)
        path = tmp_path / name / name
        path.write_bytes(bytes(path.stat().st_size))
        with pytest.raises(RunError, match="cannot be loaded: ") as raised:
            engine.load(tmp_path / name)
        assert "\n" not in raised.value.message
