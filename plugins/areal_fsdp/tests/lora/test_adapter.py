"""An adapter in a model, compared with PEFT's own use of the same files."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from areal_core.errors import RunError
from areal_fsdp.lora.adapter import install
from areal_fsdp.lora.settings import LoraSettings

SIZES = {
    "vocab_size": 31, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SIZES, tie_word_embeddings=False, attention_bias=True),
    "gpt2": lambda: GPT2Config(vocab_size=31, n_embd=16, n_layer=2, n_head=2, n_positions=32),
}


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a model's folder, the model, and its adapter with B other than 0."""

    def build(kind="qwen3", settings=None, *, learns=True, dtype=torch.float32, head=""):
        torch.manual_seed(0)
        factory = AutoModelForSequenceClassification if head else AutoModelForCausalLM
        folder = tmp_path / kind
        options = {"num_labels": 1} if head else {}
        if not folder.exists():
            config = CONFIGS[kind]()
            if head:
                config.num_labels = 1
                config.pad_token_id = 0
            factory.from_config(config).save_pretrained(folder)
        model = factory.from_pretrained(folder, dtype=dtype, **options).eval()
        adapter = install(model, settings or LoraSettings(rank=3), source=str(folder), head=head, learns=learns)
        if settings is None or settings.from_folder is None:
            with torch.no_grad():
                for name, value in adapter.parameters().items():
                    if "lora_B" in name:
                        value.normal_()
        return folder, model, adapter

    return build


def logits(model):
    ids = torch.arange(14).view(2, 7)
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_merged_model_and_peft_with_the_exported_adapter_compute_the_same(tmp_path, make, kind):
    folder, model, adapter = make(kind)
    adapter.export(tmp_path / "adapter", {}, torch.detach)
    base = AutoModelForCausalLM.from_pretrained(folder)
    own = logits(model)
    assert float((own - logits(base)).abs().max()) > 0.1
    merged = {name: value.clone() for name, value in adapter.merged(torch.detach)}
    assert merged.keys() == dict(base.named_parameters()).keys()
    by_peft = PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(logits(by_peft), own, atol=1e-5, rtol=0)
    unloaded = dict(by_peft.merge_and_unload().named_parameters())
    for name, value in merged.items():
        torch.testing.assert_close(value, unloaded[name].detach(), atol=1e-5, rtol=0)


def test_the_exported_config_has_short_names_and_the_base_model(tmp_path, make):
    folder, _, adapter = make("llama", LoraSettings(rank=3, alpha=6))
    adapter.export(tmp_path / "adapter", {}, torch.detach)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert (sorted(config["target_modules"]), config["r"], config["lora_alpha"]) == (every, 3, 6)
    assert config["base_model_name_or_path"] == str(folder)
    assert type(config["lora_alpha"]) is int, "vLLM and SGLang read an integer"


def test_the_adapter_is_trained_in_float32_and_the_base_stays_in_bfloat16(make):
    _, model, adapter = make(dtype=torch.bfloat16)
    learning = {name for name, value in model.named_parameters() if value.requires_grad}
    assert len(learning) == len(adapter.parameters()) == 2 * 2 * 7
    for name, value in model.named_parameters():
        assert value.dtype == (torch.float32 if name in learning else torch.bfloat16), name


def test_without_the_adapter_the_model_computes_its_base(make):
    folder, model, adapter = make()
    base, own = logits(AutoModelForCausalLM.from_pretrained(folder)), logits(model)
    with adapter.without().applied():
        assert torch.equal(logits(model), base)
    with adapter.applied():
        assert torch.equal(logits(model), own)
    assert all(value.requires_grad for value in adapter.parameters().values()), "FSDP reads requires_grad only once"
    for name, value in adapter.without().merged(torch.detach):
        assert torch.equal(value, load_file(folder / "model.safetensors")[name])


def test_every_process_initializes_the_same_adapter_without_changing_the_random_state(make):
    _, _, first = make()
    torch.manual_seed(7)
    wanted = torch.rand(3)
    folder, _, _ = make()
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(7)
    second = install(model, LoraSettings(rank=3), source="", learns=True)
    assert torch.equal(torch.rand(3), wanted)
    for name, value in second.parameters().items():
        if "lora_A" in name:
            assert torch.equal(value, first.parameters()[name])
        else:
            assert not value.any()


def test_an_adapter_continues_from_its_files(tmp_path, make):
    _, model, adapter = make()
    adapter.export(tmp_path / "adapter", {}, torch.detach)
    wanted = logits(model)
    _, again, frozen = make(settings=LoraSettings(from_folder=tmp_path / "adapter"), learns=False)
    torch.testing.assert_close(logits(again), wanted)
    assert not any(value.requires_grad for value in again.parameters())
    assert frozen.begins_elsewhere


def test_a_saved_adapter_s_dropout_is_not_applied_and_that_is_logged(tmp_path, make, caplog):
    _, model, adapter = make()
    adapter.export(tmp_path / "adapter", {}, torch.detach)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_dropout": 0.05}))
    settings = LoraSettings(from_folder=tmp_path / "adapter")
    _, again, _ = make(settings=settings)
    torch.testing.assert_close(logits(again.train()), logits(model))
    line = f"the adapter '{tmp_path / 'adapter'}' has lora_dropout 0.05: this engine applies no dropout"
    assert [record.getMessage() for record in caplog.records if "dropout" in record.getMessage()] == [line]


def test_a_scalar_head_learns_and_is_saved_with_the_adapter(tmp_path, make):
    folder, model, adapter = make("llama", dtype=torch.bfloat16, head="score")
    assert model.score.weight.dtype == torch.float32
    assert model.score.weight.requires_grad
    with torch.no_grad():
        model.score.weight.normal_()
    adapter.export(tmp_path / "adapter", {}, lambda value: value.detach().float())
    loaded = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    by_peft = PeftModel.from_pretrained(loaded, tmp_path / "adapter")
    torch.testing.assert_close(by_peft.base_model.model.score.weight, model.score.weight.detach())
    _, again, _ = make("llama", LoraSettings(from_folder=tmp_path / "adapter"), head="score")
    assert torch.equal(again.score.weight, model.score.weight)


def test_the_error_for_files_of_another_model_names_the_tensor(tmp_path, make):
    _, _, adapter = make()
    adapter.export(tmp_path / "adapter", {}, torch.detach)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    first = min(tensors)
    smaller = {**tensors, first: tensors[first][:, 1:].contiguous()}
    without = {name: value for name, value in tensors.items() if name != first}
    for changed in (smaller, without):
        save_file(changed, path)
        with pytest.raises(RunError, match=first.removeprefix("base_model.model.")):
            make(settings=LoraSettings(from_folder=tmp_path / "adapter"))
    damaged = (
        (torch.full_like(tensors[first], torch.nan), "holds NaN or infinity"),
        (torch.ones_like(tensors[first], dtype=torch.int8), "not floating-point"),
    )
    for tensor, problem in damaged:
        save_file({**tensors, first: tensor}, path)
        with pytest.raises(RunError, match=problem) as caught:
            make(settings=LoraSettings(from_folder=tmp_path / "adapter"))
        assert str(path) in caught.value.message
    path.write_bytes(b"cut")
    with pytest.raises(RunError, match="cannot be read"):
        make(settings=LoraSettings(from_folder=tmp_path / "adapter"))


def test_a_rank_larger_than_every_matrix_is_refused_before_memory_is_allocated(make):
    with pytest.raises(RunError, match=r"adapter.rank 1000000000 is larger than any matrix allows"):
        make(settings=LoraSettings(rank=1_000_000_000, alpha=1e9))
