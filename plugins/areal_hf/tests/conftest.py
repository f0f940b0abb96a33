"""Tiny random models, a scheduler in this process, and reference outputs that use no cache."""

import pytest
import torch
import transformers

from areal_core.engines import ModelReference
from areal_core.models.images import set_attention
from areal_core.servers import SamplingParameters
from areal_hf.attention import NAME as GROUPED
from areal_hf.limits import Limits
from areal_hf.rows import LiveRequest
from areal_hf.scheduler import Scheduler
from areal_hf.server import load_model
from areal_hf.ways import Choice, Way

VOCABULARY = 48

SHAPES = {
    "qwen3": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "tie_word_embeddings": True,
    },
    "llama": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
    },
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 96},
    "mistral": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "sliding_window": 7,
    },
    "qwen3_moe": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 96,
    },
    "qwen3_5_moe_text": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
        "max_position_embeddings": 96,
    },
    "gemma2": {
        "hidden_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "sliding_window": 7,
        "query_pre_attn_scalar": 12,
    },
    "gemma3_text": {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 12,
        "intermediate_size": 64,
        "max_position_embeddings": 96,
        "sliding_window": 7,
        "query_pre_attn_scalar": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def save_model(folder, shape="qwen3", seed=0):
    """Write a random model that is far from uniform, so that mistakes show in its log-probabilities."""
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(shape, vocab_size=VOCABULARY, **SHAPES[shape])
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("other"), seed=1)


def forced_way(model, way):
    attention = GROUPED if way == "rows" else "sdpa"
    set_attention(model, attention)
    return Choice(Way(way), "forced", attention)


class Bench:
    """A scheduler in this process, its requests, and their outputs by number."""

    def __init__(self, folder, *, recompute=False, routed_experts=False, way=None, **limits):
        chosen = {"requests": 8, "sequence_length": 96, "cache_bytes": 1 << 26, "prefill_tokens": 64} | limits
        self.model = load_model(ModelReference(str(folder)), "cpu")
        with pytest.MonkeyPatch.context() as patch:
            if way is not None:  # slower ways work for any model
                patch.setattr("areal_hf.scheduler.choose_way", lambda model, longest: forced_way(model, way))
            self.scheduler = Scheduler(self.model, Limits(**chosen), recompute=recompute, routed_experts=routed_experts)
        self.requests = {}
        self.outputs = {}
        self.tops = {}
        self.of_prompts = {}

    def add(self, input_ids, seed=0, **sampling):
        number = len(self.requests)
        request = LiveRequest(number, list(input_ids), SamplingParameters(**sampling), seed)
        self.requests[number] = request
        self.scheduler.add(request)
        return number

    def step(self):
        outputs = self.scheduler.step()
        if outputs is None:
            return
        start = 0
        sizes = [count * top for count, top in zip(outputs.counts, outputs.tops, strict=True)]
        tops = zip(outputs.top_ids.split(sizes), outputs.top_logprobs.split(sizes), strict=True)
        for number, count, found in zip(outputs.numbers, outputs.counts, tops, strict=True):
            self.tops[number] = [flat.view(count, -1) if len(flat) else flat.view(count, 0) for flat in found]
        of_prompts = outputs.prompt_logprobs.split(outputs.prompt_counts)
        self.of_prompts |= dict(zip(outputs.numbers, of_prompts, strict=True))
        for number, count, stopped in zip(outputs.numbers, outputs.counts, outputs.stopped, strict=True):
            end = start + count
            self.outputs[number] = (
                outputs.tokens[start:end].tolist(),
                outputs.logprobs[start:end].tolist(),
                outputs.versions[start:end].tolist(),
                stopped,
            )
            start = end

    def run(self):
        while not self.scheduler.idle:
            self.step()
        return self.outputs

    def check_logprobs(self, number, models=None, tolerance=1e-4):
        """Assert that each log-probability is that of a plain forward with the weights of the token's version.

        So are those of the likeliest tokens, as many as requested.
        """
        request = self.requests[number]
        tokens, logprobs, versions, _ = self.outputs[number]
        tables = {
            version: plain_logprobs((models or {0: self.model})[version], request.input_ids + tokens,
                                    request.sampling.temperature)
            for version in set(versions)
        }  # fmt: skip
        first = len(request.input_ids) - 1
        for position, (token, logprob, version) in enumerate(zip(tokens, logprobs, versions, strict=True)):
            table = tables[version][first + position]
            assert abs(float(table[token]) - logprob) < tolerance
            ids, values = (flat[position] for flat in self.tops[number])
            assert len(ids) == request.sampling.top_logprobs
            wanted = table.topk(len(ids)).values.float()
            torch.testing.assert_close(values, wanted, atol=tolerance, rtol=0)
            torch.testing.assert_close(values, table[ids.long()].float(), atol=tolerance, rtol=0)


def plain_logprobs(model, tokens, temperature):
    """Return [T, V] log-probabilities of Hugging Face's own forward over one sequence, without a cache."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return torch.log_softmax(logits.double() / temperature, dim=-1)


def reference_model(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()


class _Benches:
    def __call__(self, folder, **limits):
        return Bench(folder, **limits)

    reference = staticmethod(reference_model)
    plain_logprobs = staticmethod(plain_logprobs)


@pytest.fixture(scope="session")
def bench():
    """Return a function that makes schedulers. `bench.reference(folder)` is transformers' own model."""
    return _Benches()


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Return a function from a shape to the folder of a random model, which is made once."""
    folders = {}

    def folder(shape):
        if shape not in folders:
            folders[shape] = save_model(tmp_path_factory.mktemp(shape), shape)
        return folders[shape]

    return folder


@pytest.fixture(scope="session")
def forced(tmp_path_factory):
    """Return a function from a version to the folder of a model that only generates token `5 + version`."""
    folders = {}

    def folder(version):
        if version not in folders:
            path = save_model(tmp_path_factory.mktemp("forced"), "llama")
            model = transformers.AutoModelForCausalLM.from_pretrained(path)
            with torch.no_grad():
                # The final norm turns any input into one constant vector. Only this token's row of the head is not 0.
                for parameter in model.model.layers.parameters():
                    parameter.zero_()
                model.model.embed_tokens.weight.fill_(1.0)
                model.model.norm.weight.fill_(1.0)
                model.lm_head.weight.zero_()
                model.lm_head.weight[5 + version] = 2.0
            model.save_pretrained(path)
            folders[version] = path
        return folders[version]

    return folder
