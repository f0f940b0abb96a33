"""Models that are loaded in parts: the mapping from tensors of the files to parameters, and models it fails for."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaModel,
    MixtralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from areal_core.errors import RunError
from areal_fsdp.parallel import loading
from areal_fsdp.parallel.file_names import named_as_in_files, pieces_of
from areal_fsdp.parallel.loading import load
from areal_fsdp.parallel.tensor import decoder_layers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
OPTIONS = {"dtype": torch.float32, "attn_implementation": "eager", "trust_remote_code": False}
MOES = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=2),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}
REPOSITORY = Path(__file__).parents[4]


def in_parts(folder, factory=AutoModelForCausalLM, **options):
    return load(factory, str(folder), in_parts=True, **OPTIONS, **options)


def whole(folder, factory=AutoModelForCausalLM, **options):
    return load(factory, str(folder), in_parts=False, **OPTIONS, **options)[0]


def saved(folder, config, kind=AutoModelForCausalLM.from_config):
    torch.manual_seed(1)
    kind(config).save_pretrained(folder, max_shard_size="30KB")
    return folder


def assert_same_after_filling(model, files, wanted):
    files.fill(model, model, torch.device("cpu"))
    model.tie_weights()  # `fill` keeps ties only of sharded parameters
    for found, true in (
        (dict(model.named_parameters()), dict(wanted.named_parameters())),
        (dict(model.named_buffers()), dict(wanted.named_buffers())),
    ):
        assert found.keys() == true.keys()
        for name, tensor in true.items():
            torch.testing.assert_close(found[name], tensor, atol=0, rtol=0, msg=name)


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_on_the_meta_device_is_filled_from_its_files(tmp_path, tied):
    folder = saved(tmp_path, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied))
    model, report, files = in_parts(folder)
    assert report["missing_keys"] == whole_report(folder)["missing_keys"]
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not any(buffer.is_meta for buffer in model.buffers())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert_same_after_filling(model, files, whole(folder))


def whole_report(folder):
    return load(AutoModelForCausalLM, str(folder), in_parts=False, **OPTIONS)[1]


def test_a_base_model_s_files_and_a_new_head(tmp_path):
    """The files' names lack a prefix, and the files lack the head: it is initialized as in a whole load."""
    folder = saved(tmp_path, LlamaConfig(**SIZES), LlamaModel)
    new = {"factory": AutoModelForSequenceClassification, "num_labels": 1}
    model, report, files = in_parts(folder, **new)
    assert report["missing_keys"] == {"score.weight"}
    assert not model.score.weight.is_meta
    assert model.score.weight.std() > 0
    assert_same_after_filling(model, files, whole(folder, **new))


@pytest.mark.slow
def test_a_name_of_the_hub(tmp_path, monkeypatch):
    """The folder has the layout of the hub's cache: a snapshot below a folder for the name."""
    root = tmp_path / "models--someone--small"
    commit = "0" * 40
    saved(root / "snapshots" / commit, LlamaConfig(**SIZES))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    script = (
        "import torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from areal_fsdp.parallel.loading import load\n"
        "options = {'dtype': torch.float32, 'attn_implementation': 'eager', 'trust_remote_code': False}\n"
        "model, _, files = load(AutoModelForCausalLM, 'someone/small', in_parts=True, **options)\n"
        "files.fill(model, model, torch.device('cpu'))\n"
        "print(float(sum(p.double().square().sum() for p in model.parameters())))\n"
    )
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    wanted = sum(p.detach().double().square().sum() for p in whole(root / "snapshots" / commit).parameters())
    assert float(done.stdout) == pytest.approx(float(wanted))


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_files_with_a_matrix_for_each_expert_fill_the_joined_tensors(tmp_path, kind):
    folder = saved(tmp_path, MOES[kind])
    model, _, files = in_parts(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    true = whole(folder)
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), files.streamed(model, decoder_layers(model)):
        torch.testing.assert_close(model(input_ids=ids).logits, true(input_ids=ids).logits, atol=1e-6, rtol=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert_same_after_filling(model, files, true)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_an_moe_is_sent_with_the_names_and_shapes_of_its_files(tmp_path, kind):
    folder = saved(tmp_path, MOES[kind])
    model = whole(folder)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    found = dict(named_as_in_files(model, ((name, p.detach()) for name, p in model.named_parameters())))
    assert found.keys() == stored.keys()
    assert all(tensor.is_contiguous() for tensor in found.values())
    for name, tensor in stored.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0, msg=name)


def test_an_moe_s_layers_are_gathered_one_by_one(tmp_path):
    model = whole(saved(tmp_path, MOES["qwen3_moe"]))
    gathered, yielded = [], []

    def gather():
        for name, parameter in model.named_parameters():
            gathered.append(name)
            yield name, parameter.detach()

    for name, _ in named_as_in_files(model, gather()):
        yielded.append(name)
        if "layers.0." in name:
            assert not any("layers.1." in other for other in gathered[:-1])
    assert any("layers.2.mlp.experts.3.up_proj" in name for name in yielded)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_rank_s_rows_hold_only_its_experts(tmp_path, ranks):
    model = whole(saved(tmp_path, MOES["qwen3_moe"]))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parameter = model.get_parameter(name).detach()
    pieces, first = pieces_of(model, name, parameter), 0
    stored = dict(named_as_in_files(model, [(name, parameter)]))
    for part in parameter.chunk(ranks):
        rows = torch.empty_like(part)
        own = {key: view for key, piece in pieces.items() if (view := piece.of(rows, first)) is not None}
        assert len(own) == 2 * len(part)
        for key, view in own.items():
            view.copy_(stored[key])
        torch.testing.assert_close(rows, part, atol=0, rtol=0)
        first += len(part)


def test_files_that_cannot_be_mapped_are_read_whole_with_a_warning(tmp_path, caplog, monkeypatch):
    """An example is a family that computes new tensors while it loads the files."""
    folder = saved(tmp_path, MOES["mixtral"])
    monkeypatch.setattr(loading, "pieces_of", lambda *_: None)
    model, _, files = in_parts(folder)
    assert files is None
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert "'model.layers.0.mlp.experts.gate_up_proj' is neither one of the files' tensors" in caplog.text
    assert "Each rank reads the whole model" in caplog.text


def test_a_truncated_file_gives_the_same_error_in_parts_as_whole(tmp_path):
    folder = saved(tmp_path, LlamaConfig(**SIZES))
    file = sorted(folder.glob("*.safetensors"))[-1]
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RunError) as wanted:
        whole(folder)
    with pytest.raises(RunError) as found:
        in_parts(folder)
    assert str(found.value) == str(wanted.value)
    assert f"the model '{folder}' cannot be loaded" in str(found.value)


def test_another_shape_in_the_files_gives_the_same_error_in_parts_as_whole(tmp_path):
    folder = saved(tmp_path, LlamaConfig(**SIZES))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    with pytest.raises(RunError) as wanted:
        whole(folder)
    with pytest.raises(RunError) as found:
        in_parts(folder)
    assert str(found.value) == str(wanted.value)


def test_a_model_streams_its_layers_through_its_own_forward(tmp_path):
    """A padded batch gives the same logits as one sequence; at most one layer or other module is in memory."""
    folder = saved(tmp_path, Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True))
    model, _, files = in_parts(folder)
    layers, held = decoder_layers(model), []
    for module in model.modules():
        module.register_forward_hook(
            lambda *_: held.append({name for name, parameter in model.named_parameters() if not parameter.is_meta})
        )
    ids = torch.randint(61, (2, 9), generator=torch.Generator().manual_seed(1))
    true = whole(folder)
    with torch.no_grad(), files.streamed(model, layers):
        found = model(input_ids=ids).logits
        alone = true(input_ids=ids[:1, :5]).logits
    torch.testing.assert_close(found, true(input_ids=ids).logits, atol=1e-6, rtol=0)
    torch.testing.assert_close(found[:1, :5], alone, atol=1e-5, rtol=0)
    assert all(parameter.is_meta for parameter in model.parameters())
    parts = [{name.split(".")[2] if ".layers." in name else name for name in names} for names in held]
    assert max(map(len, parts)) == 1
    assert {part for names in parts for part in names} >= {"0", "1", "2", "model.embed_tokens.weight"}
    with pytest.raises(RuntimeError, match="meta"):
        model(input_ids=ids)[0].sum().item()  # all parameters are freed


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.nightly), 8])
def test_eight_ranks_of_a_70b_model_fit_a_host_of_512_gib(tensor):
    """Load and shard files without data, and count the bytes of the shards."""
    command = [sys.executable, REPOSITORY / "benchmarks" / "loading.py", "plan", "--ranks=8", f"--tensor={tensor}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["model"] == pytest.approx(4 * 70.55e9 / 2**30, rel=1e-3)
    assert found["rank_holds"] == pytest.approx(found["model"] / 8, rel=2e-3)
    assert found["rank_reads"] == pytest.approx(found["files"] / 8, rel=2e-3)
    assert found["host_holds"] + found["probe_holds_at_most"] + 8 * found["process_peak"] < 512
    assert found["process_peak"] < 4
