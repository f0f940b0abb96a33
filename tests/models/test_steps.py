"""Three updates of a batch are those of a plain loop: transformers' model, each sequence alone, and torch's AdamW."""

import logging

import models_page
import pytest
import small_models
import torch

from areal_core.sdk import LossSpec

log = logging.getLogger(__name__)

STEPS = 3
ADAMW = {"betas": (0.9, 0.99), "eps": 1e-3}
"""A larger epsilon than usual: an element whose gradient is nothing but rounding error moves by nothing but that."""
RATE, DECAY, CLIP = 1e-3, 0.1, 1.0
TOLERANCE = 5e-6
"""Of a parameter, after updates of about 1e-3."""
PAGE = models_page.read()
PACKED = ("qwen3", "cohere", "gpt_oss", "deepseek_v3", "mixtral", "phi3", "gpt2", "gemma3_text")
FAMILIES = sorted({*PACKED, *(name for name, row in PAGE.items() if row.train.text in ("mixers", "rows"))})
FAST = ("qwen3", "lfm2", "gemma2")


def plain_loop(folder, batch):
    """Parameters after the updates, by name."""
    model = small_models.load(folder)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, **ADAMW)
    for _ in range(STEPS):
        small_models.reference_of(model, batch)
        torch.nn.utils.clip_grad_norm_(parameters.values(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in parameters.items()}


@pytest.mark.parametrize("family", small_models.by_tier(FAMILIES, FAST))
def test_three_updates_are_those_of_a_plain_loop(family, tmp_path):
    small_models.make_model(family, tmp_path)
    batch = small_models.make_batch()
    before = {name: p.detach().clone() for name, p in small_models.load(tmp_path).named_parameters()}
    wanted = plain_loop(tmp_path, batch)
    engine = small_models.set_up(
        tmp_path,
        betas=ADAMW["betas"],
        epsilon=ADAMW["eps"],
        weight_decay=DECAY,
        max_gradient_norm=CLIP,
    )
    for _ in range(STEPS):
        engine.train([LossSpec("any", batch, ["logprobs"], small_models.weighted_sum)])
    found = {name: parameter.detach() for name, parameter in engine._parameters.items()}
    engine.close()
    assert found.keys() == wanted.keys()
    errors = {name: float((found[name] - parameter).abs().max()) for name, parameter in wanted.items()}
    moved = max(float((parameter - before[name]).abs().max()) for name, parameter in wanted.items())
    worst = max(errors, key=errors.__getitem__)
    log.info("%s: parameters moved by %.3g and differ by %.3g, %s most", family, moved, errors[worst], worst)
    assert moved > 100 * TOLERANCE
    assert errors[worst] < TOLERANCE, worst


@pytest.mark.parametrize(
    ("compiles", "checkpointing"),
    [(False, "selective"), (False, "full"), pytest.param(True, "selective", marks=pytest.mark.nightly)],
)
def test_recomputed_layers_are_those_that_a_model_has(compiles, checkpointing, tmp_path):
    """LongCat-Flash has half as many as its config counts: each has attention twice."""
    small_models.make_model("longcat_flash", tmp_path, num_hidden_layers=4)
    batch = small_models.make_batch()
    _, wanted = small_models.reference(tmp_path, batch)
    engine = small_models.set_up(tmp_path, compile=compiles, activation_checkpointing=checkpointing)
    assert len(engine._module.model.model.layers) == 2
    assert engine._decoder is None, "the memory plan knows no layers with attention twice"
    found = small_models.gradients(engine, batch)
    engine.close()
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert float((found[name] - gradient).abs().max()) < small_models.GRADIENT_TOLERANCE * largest, name
