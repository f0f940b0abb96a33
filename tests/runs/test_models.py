import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import GenerationConfig, PreTrainedTokenizerFast

from areal_core.errors import RunError
from areal_core.interfaces import ModelReference
from areal_core.runs.models import end_tokens, load_tokenizer
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
