"""Composite models are trained from text alone: what text does not go through stays in the export as it was."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

from areal_core.data import PackedBatch, Ragged
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.errors import RunError
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_core.servers import SamplingParameters
from areal_core.training.weights_file import describe_weights, write_weights
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_hf.limits import Limits
from areal_hf.rows import LiveRequest
from areal_hf.scheduler import Scheduler
from areal_hf.server import load_model

HERE = Path(__file__).parent


def _load(name):
    specification = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module


composite_models, small_models = _load("composite_models"), _load("small_models")
FAST = ("qwen3_5", "mistral3")
EVERY = [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in composite_models.FAMILIES]


@pytest.fixture
def folder(family, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "areal_vision", None)  # as where it is not installed
    monkeypatch.setitem(sys.modules, "areal_vision.places", None)
    composite_models.make_model(family, tmp_path / "model")
    return tmp_path / "model"


def set_up(folder, dtype, **settings):
    engine = FSDPEngine(FSDPConfig(learning_rate=1e-2, weight_decay=0.1, max_tokens_per_microbatch=30))
    engine.setup(ModelReference(str(folder), dtype), ACTOR, OptimizerSettings(1, 1.0, is_exported=True, **settings))
    return engine


def make_batch():
    """Without tokens that stand for images."""
    batch = small_models.make_batch()
    return batch.with_tokens(input_ids=batch["input_ids"] % 50)


def loss(part, outputs):
    return LossResult((outputs["logprobs"] * part["weights"]).sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", EVERY)
def test_text_is_trained_and_all_else_is_exported_as_it_was(folder, dtype, tmp_path):
    batch = make_batch()
    whole = AutoModelForMultimodalLM.from_pretrained(folder, attn_implementation="eager").eval()
    before = load_file(folder / "model.safetensors")
    engine = set_up(folder, dtype)
    assert {p.dtype for p in engine._module.model.parameters()} == {getattr(torch, dtype)}
    if dtype == "float32":
        found = engine.forward(batch, ["logprobs"])["logprobs"].split(small_models.LENGTHS)
        columns = (batch[name].split(small_models.LENGTHS) for name in ("input_ids", "targets"))
        for ids, targets, values in zip(*columns, found, strict=True):
            with torch.no_grad():
                logits = whole(input_ids=ids[None], use_cache=False).logits[0]
            wanted = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
            torch.testing.assert_close(values, wanted, atol=1e-5, rtol=1e-5)
    engine.train([LossSpec("any", batch, ["logprobs"], loss)])
    synced = dict(engine.named_full_parameters())
    assert before.keys() - synced.keys() == {"mtp.fc.weight"}
    learned = {name.replace("model.language_model", "language_model.model") for name in engine._parameters}
    engine.export(tmp_path / "export")
    engine.close()
    after = load_file(tmp_path / "export" / "model.safetensors")
    assert after.keys() == before.keys()
    beside = [name for name in before if not any(part in name for part in ("language_model", "lm_head"))]
    assert "mtp.fc.weight" in beside
    assert len(beside) > 10
    for name in beside:
        assert torch.equal(after[name], before[name].to(after[name].dtype)), name
    changed = {name for name in before if not torch.equal(after[name].float(), before[name].float())}
    assert len(changed) >= len(learned) > 15
    again, report = AutoModelForMultimodalLM.from_pretrained(tmp_path / "export", output_loading_info=True)
    assert type(again) is type(whole)
    assert not report["missing_keys"]


@pytest.mark.parametrize("family", ["mistral3", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_the_embedded_engine_generates_text_and_takes_its_weights(family, folder, tmp_path):
    engine = set_up(folder, "float32")
    engine.train([LossSpec("any", make_batch(), ["logprobs"], loss)])
    (tmp_path / "synced").mkdir()
    write_weights(tmp_path / "synced" / "model.safetensors", describe_weights(engine), engine.named_full_parameters())
    model = load_model(ModelReference(str(folder), "float32"), "cpu")
    scheduler = Scheduler(model, Limits(2, 32, 1 << 20, 32), recompute=False)
    scheduler.update_weights(1, tmp_path / "synced")
    scheduler.add(LiveRequest(0, [5, 9, 3, 7], SamplingParameters(max_new_tokens=6), 1))
    while (outputs := scheduler.step()) is None:
        pass
    ids = torch.tensor([5, 9, 3, 7, *outputs.tokens.tolist()])
    row = PackedBatch(Ragged(torch.tensor([len(ids)]), {"input_ids": ids, "targets": ids.roll(-1)}), {})
    wanted = engine.forward(row, ["logprobs"])["logprobs"][3:-1]
    engine.close()
    torch.testing.assert_close(outputs.logprobs, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3_5"])
def test_a_run_that_shows_images_needs_what_shows_them(folder):
    with pytest.raises(RunError, match=r"areal_vision\.places is needed here, and is not installed"):
        set_up(folder, "float32", shows_images=True)
