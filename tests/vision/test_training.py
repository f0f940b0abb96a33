"""Training on images: packed is what transformers computes one by one, on one rank and on two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from vision_rank_program import make_batch, make_engine, parts_of, train

from areal_core.errors import RunError

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent


def test_packed_log_probabilities_and_gradients_are_those_of_transformers(folder):
    from transformers import AutoModelForImageTextToText

    batch = make_batch(folder)
    engine = make_engine(folder, max_tokens_per_microbatch=40)
    found = engine.forward(batch, ["logprobs"])["logprobs"]
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    loss = torch.zeros(())
    for part, logprobs in zip(parts_of(batch), torch.split(found, batch.lengths.tolist()), strict=True):
        ids, grid, pixels, targets, weights = part
        kinds = (ids == model.config.image_token_id).int()
        seen = {"pixel_values": pixels, "image_grid_thw": grid} if len(grid) else {}
        logits = model(input_ids=ids[None], mm_token_type_ids=kinds[None], use_cache=False, **seen).logits[0]
        wanted = torch.log_softmax(logits, -1).gather(1, targets[:, None])[:, 0]
        assert torch.allclose(logprobs, wanted.detach(), atol=2e-5)
        loss = loss - (weights * wanted).sum()
    loss.backward()
    gradients = train(engine, batch)
    compared = 0
    for name, parameter in model.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(gradients[name], wanted, atol=1e-5), name
        compared += name.startswith("model.visual") and bool(wanted.abs().max() > 1e-4)
    assert compared > 10, "images have gradients of their own"
    engine.close()


def test_two_ranks_have_the_gradients_of_one(folder, tmp_path):
    """Their sequences differ: one rank's micro-batch may have no image at all."""
    engine = make_engine(folder)
    wanted = train(engine, make_batch(folder))
    engine.close()
    words = [str(HERE / "vision_rank_program.py"), str(folder), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [sys.executable, *words, str(rank)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, error = rank.communicate(timeout=600)
            assert rank.returncode == 0, error
    finally:
        for rank in ranks:
            rank.kill()
    for rank in range(2):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        for name, gradient in wanted.items():
            assert torch.allclose(found["gradients"][name], gradient, atol=1e-5), name
        assert "VLMs support neither context nor tensor parallelism" in found["refused"]


def test_images_for_a_model_of_text_are_refused(folder, tmp_path):
    from areal_grpo.demonstration.model import make_model

    engine = make_engine(make_model(tmp_path / "text"))
    with pytest.raises(RunError, match="the batch has images, but the model type 'qwen3' supports none"):
        engine.forward(make_batch(folder), ["logprobs"])
    engine.close()


def test_a_checkpoint_and_an_export_hold_the_tower_too(folder, tmp_path):
    from safetensors.torch import load_file

    batch, engine = make_batch(folder), make_engine(folder)
    train(engine, batch, keeps=False)
    engine.save(tmp_path / "saved")
    engine.export(tmp_path / "exported")
    again, resumed = make_engine(tmp_path / "exported"), make_engine(folder)
    resumed.load(tmp_path / "saved")
    wanted = engine.forward(batch, ["logprobs"])["logprobs"]
    assert torch.equal(again.forward(batch, ["logprobs"])["logprobs"], wanted)
    assert torch.equal(resumed.forward(batch, ["logprobs"])["logprobs"], wanted)
    former, new = load_file(folder / "model.safetensors"), load_file(tmp_path / "exported" / "model.safetensors")
    assert former.keys() == new.keys()
    assert not torch.equal(former["model.visual.patch_embed.proj.weight"], new["model.visual.patch_embed.proj.weight"])
    assert (tmp_path / "exported" / "preprocessor_config.json").is_file(), "else nobody could show it an image"
    for each in (engine, again, resumed):
        each.close()
