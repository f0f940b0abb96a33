"""The architectures of the page are those that the servers' sources register."""

import models_page
import pytest
import small_models

from areal_core.inference.installations import find_server
from areal_sglang import architectures as sglang
from areal_vllm import architectures as vllm

PAGE = models_page.read()
VLLM = """
_TEXT_GENERATION_MODELS = {"LlamaForCausalLM": ("llama", "LlamaForCausalLM")}
_MULTIMODAL_MODELS = {}
_EMBEDDING_MODELS = {"BertModel": ("bert", "BertEmbeddingModel")}
_TRANSFORMERS_SUPPORTED_MODELS = {"GlmForCausalLM": ("transformers", "TransformersForCausalLM")}
_VLLM_MODELS = {**_TEXT_GENERATION_MODELS}
raise SystemExit("it is not imported")
"""


@pytest.mark.parametrize(("name", "module"), [("vllm", vllm), ("sglang", sglang)])
def test_the_page_says_what_the_installed_server_has(name, module):
    found = find_server(name)
    if found is None or found.version != models_page.versions()[name]:
        pytest.skip(f"{name} of the page is not installed")
    known = module.registered(found.package)
    for family, row in PAGE.items():
        assert getattr(row, name).text == known.get(small_models.architecture(family), "no"), family


def test_registries_are_read_and_not_imported(tmp_path):
    registry = tmp_path / "model_executor" / "models" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text(VLLM)
    assert vllm.registered(tmp_path) == {"LlamaForCausalLM": "yes", "GlmForCausalLM": "by transformers"}
    registry.write_text("_MODELS = {}")
    with pytest.raises(ValueError, match="has no table _TRANSFORMERS_SUPPORTED_MODELS"):
        vllm.registered(tmp_path)
    models = tmp_path / "srt" / "models"
    models.mkdir(parents=True)
    (models / "llama.py").write_text("import nothing\nEntryClass = [LlamaForCausalLM, Phi3ForCausalLM]\n")
    (models / "qwen3.py").write_text("class Qwen3ForCausalLM: pass\nEntryClass = Qwen3ForCausalLM\n")
    names = {"LlamaForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM"}
    assert sglang.registered(tmp_path) == dict.fromkeys(names, "yes")
    with pytest.raises(ValueError, match="no module"):
        sglang.registered(tmp_path / "srt")


def test_a_server_is_found_in_an_environment_below_the_cache(tmp_path, monkeypatch):
    site = tmp_path / "servers" / "a_server" / "lib" / "python3.12" / "site-packages"
    (site / "a_server").mkdir(parents=True)
    (site / "a_server_cpu-1.2.dist-info").mkdir()
    (site / "a_server_cpu-1.2.dist-info" / "METADATA").write_text("Name: a-server-cpu\nVersion: 1.2\n")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    assert find_server("a_server") == (site / "a_server", "1.2")
    assert find_server("no_server") is None
