import json
import re
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from areal_core.config import load_run, resolve
from areal_core.engines import ModelReference
from areal_core.errors import RunError
from areal_core.runs.models import check_same_tokens, end_tokens, load_tokenizer, model_path
from areal_testing.conformance import make_model

WORDS = {"<end of text>": 0, "<end of turn>": 1, "word": 2}


@pytest.mark.parametrize(
    ("named", "expected"),
    [(1, {0, 1}), ([0, 1], {0, 1}), ([1, 2], {0, 1, 2}), (None, {0})],
)
def test_an_answer_ends_where_the_tokenizer_or_the_generation_config_says(tmp_path, named, expected):
    GenerationConfig(eos_token_id=named).save_pretrained(tmp_path)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(WORDS)), eos_token="<end of text>")
    assert end_tokens(ModelReference(str(tmp_path)), tokenizer) == expected


def test_a_model_without_a_generation_config_ends_where_its_tokenizer_says(tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(WORDS)), eos_token="<end of text>")
    assert end_tokens(ModelReference(str(tmp_path)), tokenizer) == {0}
    tokenizer.eos_token = None
    assert end_tokens(ModelReference(str(tmp_path)), tokenizer) == set()


def test_a_tokenizer_made_out_of_nothing_is_refused(tmp_path):
    """Qwen's comes without an error where its files are missing, and every prompt would be no token at all."""
    with pytest.raises(RunError, match="has no tokenizer files"):
        load_tokenizer(ModelReference(str(make_model(tmp_path))))


def test_a_tokenizer_knows_the_context_of_its_model(tmp_path):
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(WORDS)), eos_token="<end of text>").save_pretrained(
        tmp_path
    )
    assert load_tokenizer(ModelReference(str(tmp_path))).model_max_length > 1 << 40, "a tokenizer alone"
    make_model(tmp_path)
    context = json.loads((tmp_path / "config.json").read_text())["max_position_embeddings"]
    assert load_tokenizer(ModelReference(str(tmp_path))).model_max_length == context


def test_a_role_with_other_tokens_is_refused(tmp_path):
    """It would be given numbers that mean other texts to it, and all that could be seen is that nothing is learned."""
    folders = {}
    for name, words in {"own": WORDS, "same": {**WORDS, "more": 3}, "other": {**WORDS, "word": 3, "more": 2}}.items():
        folders[name] = ModelReference(str(tmp_path / name))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words)), eos_token="<end of text>")
        tokenizer.save_pretrained(tmp_path / name)
    check_same_tokens(folders["own"], "teacher", folders["same"])
    check_same_tokens(folders["own"], "teacher", ModelReference(str(make_model(tmp_path / "without"))))
    with pytest.raises(RunError, match=r"role 'teacher': the model '.*other' has other tokens than '.*own': 1 of 3"):
        check_same_tokens(folders["own"], "teacher", folders["other"])


def test_a_model_that_is_nowhere_is_told_by_its_key_and_its_folder(tmp_path, monkeypatch):
    """What reads like a name on the hub may be a folder that is missing: only the process that loads it can know."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    resolved = SimpleNamespace(base_dir=tmp_path)
    folder = re.escape(f"{tmp_path}/models/teacher")
    with pytest.raises(
        RunError, match=rf"roles.teacher.path: there is no folder {folder}, and 'models/teacher' cannot"
    ):
        model_path(resolved, "models/teacher", "roles.teacher.path")
    (tmp_path / "models" / "teacher").mkdir(parents=True)
    assert model_path(resolved, "models/teacher") == str(tmp_path / "models" / "teacher")


def test_models_are_written_as_the_folders_that_a_run_took_them_from(tmp_path):
    words = ["model.source=null", "model.path=org/name", "algorithm.regularizers=[reference_kl]"]
    resolved = resolve(None, ["grpo"], [*words, "roles.reference.path=org/other"], environment={})
    folders = {"model.path": "/cache/name/snapshots/1", "roles.reference.path": "/cache/other/snapshots/2"}
    (tmp_path / "config.yaml").write_text(resolved.to_yaml(folders))
    config = load_run(tmp_path).config
    assert config.model.path == folders["model.path"]
    assert config.roles["reference"].common.path == folders["roles.reference.path"]
    assert resolved.config.model.path == "org/name"
