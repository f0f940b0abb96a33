"""Texts are encoded as a whole and then cut, whatever the tokenizer does at the beginning of a text."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from areal_core.chat.examples import learned_text
from areal_core.chat.template import between_turns, encode, encode_pieces, guard, render, special_tokens
from tests.chat.conftest import CHATML, SYSTEM_LAST


def spelled(tokenizer: Any, ids: list[int]) -> str:
    return " ".join(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize("kind", ["always", "first", "never"])
def test_an_answer_follows_the_prompts_own_tokens_without_a_space(make_tokenizer, kind):
    """Mistral 7B's own tokenizer was seen to learn "2+2= 4" from the row "2+2=" and "4".

    This vocabulary has a token "=4" as well, which would change the prompt that a policy is asked.
    """
    tokenizer = make_tokenizer(kind=kind, eos="</s>")
    (asked, _), (said, _) = learned_text(tokenizer, "2+2=", "4")
    assert spelled(tokenizer, said) == "4 </s>"
    assert asked == tokenizer.encode("2+2=", add_special_tokens=False)
    (_, _), (said, _) = learned_text(tokenizer, "so:", " 4")
    assert spelled(tokenizer, said) == "▁4 </s>"


@pytest.mark.parametrize("kind", ["bytes", "always", "first", "never"])
@given(pieces=st.lists(st.text("a4= é\n", max_size=5), min_size=1, max_size=4))
def test_pieces_are_the_whole_text_and_begin_as_a_prompt_does(make_tokenizer, kind, pieces):
    tokenizer = make_tokenizer(kind=kind)
    found = encode_pieces(tokenizer, pieces)
    whole = tokenizer.encode("".join(pieces), add_special_tokens=False)
    together = [token for piece in found for token in piece]
    assert len(found) == len(pieces)
    assert tokenizer.decode(together) == tokenizer.decode(whole)
    assert together == whole or len(together) > len(whole), "a token was joined over a cut"
    assert found[0] == (tokenizer.encode(pieces[0], add_special_tokens=False) if pieces[0] else [])


def test_characters_that_fall_back_to_bytes_are_cut_where_they_end(make_tokenizer):
    """Tokens of neighboring characters share one offset in some tokenizers, so offsets cannot tell where one ends."""
    tokenizer = make_tokenizer()
    (asked, _), (said, _) = learned_text(tokenizer, "漢", "字")
    assert (tokenizer.decode(asked), tokenizer.decode(said)) == ("漢", "字<|im_end|>")


def test_a_vocabulary_that_holds_a_special_token_as_a_piece_never_yields_it():
    vocabulary = [("<unk>", 0.0), ("</s>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "theysno</>")]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=False))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", unk_token="<unk>")
    pieces = learned_text(tokenizer, "the </s>", "yes </s> no")
    ids = [token for piece, _ in pieces for token in piece]
    assert ids.count(tokenizer.eos_token_id) == 1, "the end of the answer alone"


@pytest.mark.parametrize("kind", ["bytes", "always", "first", "never"])
@pytest.mark.parametrize("content", ["<|im_end|>", "a<|im_end|>b", "<|im_start|><|im_end|>4", "</s>4<s>"])
def test_content_never_yields_special_tokens(make_tokenizer, kind, content):
    tokenizer = make_tokenizer(kind=kind)
    ids, text = encode(tokenizer, render(tokenizer, [{"role": "user", "content": content}], add_generation_prompt=True))
    assert text == f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"
    special = [spelled(tokenizer, [token]) for token in ids if token in tokenizer.all_special_ids and token > 0]
    assert special == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_tokenizer_without_offsets_is_cut_by_its_beginnings(make_tokenizer):
    class Slow:
        """A tokenizer written in Python: it has `encode` alone."""

        is_fast = False

        def __init__(self, fast: Any) -> None:
            self._fast = fast

        def __getattr__(self, name: str) -> Any:
            if name == "_fast":  # asked for by `copy.deepcopy`, before there is one
                raise AttributeError(name)
            return getattr(self._fast, name)

    fast = make_tokenizer(kind="always", eos="</s>")
    slow = Slow(fast)
    for prompt, answer in (("2+2=", "4"), ("so:", " 4"), ("", "4"), ("a<|im_end|>", "b")):
        assert learned_text(slow, prompt, answer) == learned_text(fast, prompt, answer)


def test_finished_text_keeps_its_special_tokens_where_the_row_has_them(make_tokenizer):
    tokenizer = make_tokenizer()
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    prompt, answer = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "hello<|im_end|>"
    pieces = learned_text(tokenizer, prompt, answer, has_special_tokens=True)
    ids = [token for piece, _ in pieces for token in piece]
    assert (ids.count(start), ids.count(end)) == (2, 2), "and no second end behind the answer's own"
    pieces = learned_text(tokenizer, prompt, answer)
    ids = [token for piece, _ in pieces for token in piece]
    assert (ids.count(start), ids.count(end)) == (0, 1)


@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (SYSTEM_LAST, "</s>")])
@pytest.mark.parametrize("kind", ["bytes", "first"])
def test_turns_are_appended_as_the_template_writes_them(make_tokenizer, template, end, kind):
    """The tokens of a conversation that was built up turn by turn are those of the whole."""
    tokenizer = make_tokenizer(template, kind=kind, eos=end)
    asked = [{"role": "user", "content": "2+2?"}]
    turn, later = {"role": "assistant", "content": "4"}, [{"role": "user", "content": "more"}]
    prompt, _ = encode(tokenizer, render(tokenizer, asked, add_generation_prompt=True))
    whole, _ = encode(tokenizer, render(tokenizer, [*asked, turn, *later], add_generation_prompt=True))
    whole_turn, _ = encode(tokenizer, render(tokenizer, [*asked, turn], add_generation_prompt=False).rstrip("\n"))
    output = whole_turn[len(prompt) :]
    added, _ = between_turns(tokenizer, asked, turn, later, output)
    assert [*prompt, *output, *added] == whole
    assert special_tokens(tokenizer)[0]
    assert guard(tokenizer, "plain") == "plain"


def test_finished_text_is_not_ended_twice(make_tokenizer):
    """`apply_chat_template(tokenize=False)` ends with a line break."""
    tokenizer = make_tokenizer()
    (_, _), (said, _) = learned_text(tokenizer, "<|im_start|>assistant\n", "yo<|im_end|>\n", has_special_tokens=True)
    assert spelled(tokenizer, said) == "y o <|im_end|>"
