"""The embedded engine generates with each family exactly, by the way that is expected of it."""

import importlib.util
import random
import sys
from pathlib import Path

import models_page
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from areal_core.engines import ModelReference
from areal_core.servers import SamplingParameters
from areal_hf import ways
from areal_hf.asked import Asked
from areal_hf.cohorts import CohortDecoder
from areal_hf.limits import Limits
from areal_hf.rows import LiveRequest
from areal_hf.scheduler import Scheduler
from areal_hf.server import load_model

HERE = Path(__file__).parent
TOLERANCE = 1e-4
FAST = ("qwen3", "gpt_oss", "qwen3_5_text", "deepseek_v32", "phi3", "llama4_text", "nemotron_h", "recurrent_gemma")
"""Plain attention; sinks; a recurrent state; an indexer; changing frequencies; chunks; a bounded step; no cache."""
WHOLE = {"nemotron_h", "recurrent_gemma", "zamba2"}
COHORTS = {
    "bamba",
    "bloom",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "glm_moe_dsa",
    "gptj",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "llama4_text",
    "mamba",
    "mamba2",
    "minimax",
    "mpt",
    "olmo_hybrid",
    "opt",
    "phi3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
}


def _load(path):
    if path.stem not in sys.modules:
        specification = importlib.util.spec_from_file_location(path.stem, path)
        sys.modules[path.stem] = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(sys.modules[path.stem])
    return sys.modules[path.stem]


small_models = _load(HERE / "small_models.py")
EVERY = small_models.by_tier(small_models.FAMILIES, FAST)


def choose(folder, longest=48):
    return ways.choose_way(load_model(ModelReference(str(folder)), "cpu"), longest)


def generate(folder, new=16):
    """Generate for nine requests of unequal lengths, of which at most five run, and which join while others run.

    Returns:
        The scheduler's choice, and for each request its prompt, tokens and log-probabilities.
    """
    scheduler = Scheduler(load_model(ModelReference(str(folder)), "cpu"), Limits(5, 48, 1 << 26, 64), recompute=False)
    chance, requests, found = random.Random(1), {}, []

    def step():
        outputs = scheduler.step()
        if outputs is not None:
            tokens, logprobs = (torch.split(each, outputs.counts) for each in (outputs.tokens, outputs.logprobs))
            for number, own, values in zip(outputs.numbers, tokens, logprobs, strict=True):
                found.append((requests[number], own.tolist(), values))

    for number in range(9):
        prompt = [chance.randrange(2, small_models.VOCABULARY) for _ in range(chance.randint(1, 14))]
        sampling = SamplingParameters(greedy=number % 2 == 0, max_new_tokens=chance.randint(1, new))
        requests[number] = LiveRequest(number, prompt, sampling, number)
        scheduler.add(requests[number])
        for _ in range(3 if number in (2, 3, 5) else 0):
            step()
    while not scheduler.idle:
        step()
    assert len(found) == len(requests)
    return scheduler.choice, found


def largest_distance(folder, found, *, by_prefix=False):
    """The largest distance to transformers' own forward over the whole sequence; infinite where a greedy token is not
    the most probable."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    largest = 0.0
    for request, tokens, logprobs in found:
        ids, first = torch.tensor([request.input_ids + tokens]), len(request.input_ids)
        with torch.inference_mode():
            if by_prefix:
                ends = range(first, ids.shape[1])
                logits = torch.stack([model(ids[:, :end], use_cache=False).logits[0, -1] for end in ends])
            else:
                logits = model(ids, use_cache=False).logits[0, first - 1 : -1]
        wanted = torch.log_softmax(logits.double(), -1)
        own = wanted.gather(1, ids[0, first:, None])[:, 0]
        largest = max(largest, float((own - logprobs).abs().max()))
        if request.sampling.greedy and float((wanted.max(-1).values - own).max()) > TOLERANCE:
            return float("inf")
    return largest


@pytest.mark.parametrize("family", EVERY)
def test_tokens_and_logprobs_are_those_of_a_plain_forward(family, tmp_path):
    small_models.make_model(family, tmp_path)
    choice, found = generate(tmp_path)
    # With longrope, a token's frequencies are those of the sequence up to it.
    assert largest_distance(tmp_path, found, by_prefix=family == "phi3") < TOLERANCE
    if transformers.__version__ == models_page.versions()["transformers"]:  # another one may have another cache
        assert choice.way == ("whole" if family in WHOLE else "cohorts" if family in COHORTS else "rows")
    assert bool(choice.reason) == (choice.way != "rows")


@pytest.mark.parametrize(
    ("family", "checks"),
    [
        ("phi3", ["areal_hf.ways._turning_point", "areal_hf.ways._Trial._check"]),
        ("nemotron_h", ["areal_hf.ways._Trial._refuse_limited_steps"]),
        ("zamba2", ["areal_hf.ways._Trial._refuse_limited_steps", "areal_hf.ways._Trial._check"]),
    ],
)
def test_without_its_check_a_model_is_wrong(family, checks, tmp_path, monkeypatch):
    small_models.make_model(family, tmp_path)
    for check in checks:
        monkeypatch.setattr(check, lambda *inputs: None)
    _, found = generate(tmp_path)
    assert largest_distance(tmp_path, found, by_prefix=family == "phi3") > TOLERANCE


def make_gpt_neo(folder):
    """Its attention has a window of its own making, which ends beyond the tokens of the trial."""
    changes = {"vocab_size": small_models.VOCABULARY, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
    changes |= {"attention_types": [[["global", "local"], 1]], "window_size": 20, "max_position_embeddings": 64}
    small_models.FAMILIES["gpt_neo"] = changes
    try:
        small_models.make_model("gpt_neo", folder)
    finally:
        del small_models.FAMILIES["gpt_neo"]


def test_a_mask_that_a_layer_does_not_show_keeps_a_model_from_rows(tmp_path, monkeypatch):
    make_gpt_neo(tmp_path)
    choice, found = generate(tmp_path, new=30)
    assert largest_distance(tmp_path, found) < TOLERANCE
    assert choice.way == "cohorts"
    seen_masks = Asked(layers=2, more=[], fault="")
    monkeypatch.setattr("areal_hf.ways.asked_of_attention", lambda *inputs: seen_masks)
    choice, found = generate(tmp_path, new=30)
    assert choice.way == "rows"
    assert largest_distance(tmp_path, found) > TOLERANCE


@pytest.mark.parametrize(
    ("family", "changes", "way", "attention"),
    [
        ("gemma2", {"attn_logit_softcapping": 1e4}, "rows", "eager"),
        ("llama4_text", {"attention_chunk_size": 4096, "floor_scale": 8192}, "cohorts", "sdpa"),
        ("deepseek_v32", {"index_topk": 2048}, "cohorts", "sdpa"),
        ("mistral", {"sliding_window": 4096}, "rows", "areal_grouped"),
    ],
)
def test_what_a_few_tokens_do_not_reach_is_seen(tmp_path, family, changes, way, attention):
    small_models.make_model(family, tmp_path, **changes)
    choice = choose(tmp_path)
    assert (choice.way, choice.attention) == (way, attention)


def test_keys_that_are_chosen_in_long_sequences_alone_are_seen(tmp_path, monkeypatch):
    small_models.make_model("doge", tmp_path, keep_window_size=20)
    assert choose(tmp_path, longest=20).way == "cohorts"
    beyond = choose(tmp_path, longest=21)
    assert beyond.way == "refused"
    assert "DogeAttention chooses keys among later tokens too in sequences of more than 20 tokens" in beyond.reason
    monkeypatch.setattr("areal_hf.ways._Trial._refuse_chosen_keys", lambda trial: None)
    choice, found = generate(tmp_path, new=30)
    assert choice.way == "cohorts"
    assert largest_distance(tmp_path, found) > TOLERANCE


def test_longrope_takes_rows_where_no_sequence_reaches_its_turning_point(tmp_path):
    small_models.make_model("phi3", tmp_path)
    assert choose(tmp_path, longest=8).way == "rows"
    beyond = choose(tmp_path, longest=9)
    assert beyond.way == "cohorts"
    assert beyond.reason.endswith("(max_sequence_length: 8 avoids that)")


def test_outputs_that_are_not_finite_are_refused(tmp_path):
    small_models.make_model("qwen3", tmp_path)
    model = load_model(ModelReference(str(tmp_path)), "cpu")
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    choice = ways.choose_way(model)
    assert choice.way == "refused"
    assert "the outputs of a plain forward are not finite" in choice.reason


@pytest.mark.parametrize(
    ("family", "way"),
    [("deepseek_v3", "rows"), ("minimax_m2", "rows"), ("mamba2", "cohorts"), ("bamba", "cohorts")],
)
def test_rounding_to_bfloat16_keeps_a_model_from_no_way(tmp_path, family, way):
    """It turns choices of routers over."""
    small_models.make_model(family, tmp_path)
    assert ways.choose_way(load_model(ModelReference(str(tmp_path), "bfloat16"), "cpu")).way == way


def test_a_wrong_way_is_seen_in_bfloat16(tmp_path, monkeypatch):
    """Without positions, this model's tokens all are the first."""
    small_models.make_model("bamba", tmp_path)
    forward = CohortDecoder._forward
    without = {"position_ids": None}
    monkeypatch.setattr(
        CohortDecoder, "_forward", lambda own, inputs, *rest, **more: forward(own, inputs | without, *rest, **more)
    )
    choice = ways.choose_way(load_model(ModelReference(str(tmp_path), "bfloat16"), "cpu"))
    assert choice.way == "whole"
    assert "cohorts: its log-probabilities differ from a plain forward's by" in choice.reason


def test_a_wrong_sequence_among_right_ones_is_seen_in_bfloat16(tmp_path, monkeypatch):
    """With a cache, all positions beyond 8 become 8: seven tokens of the first request, and few of the others."""
    small_models.make_model("bamba", tmp_path)
    forward = CohortDecoder._forward

    def clamped(decoder, inputs, cache, **options):
        positions = inputs["position_ids"] if cache is None else inputs["position_ids"].clamp(max=8)
        return forward(decoder, inputs | {"position_ids": positions}, cache, **options)

    monkeypatch.setattr(CohortDecoder, "_forward", clamped)
    choice = ways.choose_way(load_model(ModelReference(str(tmp_path), "bfloat16"), "cpu"))
    assert choice.way == "whole"
    assert "cohorts: its log-probabilities differ from a plain forward's by" in choice.reason


@pytest.mark.parametrize("family", ["nemotron_h", "zamba2"])
def test_a_bounded_time_step_is_seen_in_bfloat16(family, tmp_path):
    """Rounding hides it from the trial, and a high bound is far more than rounding."""
    small_models.make_model(family, tmp_path, time_step_min=0.02)
    choice = ways.choose_way(load_model(ModelReference(str(tmp_path), "bfloat16"), "cpu"))
    assert choice.way == "whole"
    assert "bounds its time step" in choice.reason
