import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from areal_core.errors import RunError
from areal_core.interfaces import ModelReference
from areal_core.runs.models import check_same_tokens, end_tokens, load_tokenizer
from areal_core.testing.conformance import make_model

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
