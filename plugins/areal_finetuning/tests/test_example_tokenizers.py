"""Which exact tokens of a row are learned, with a tokenizer of one token a character and a chat template."""

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_core.data import FinishReason
from areal_core.errors import RunError
from areal_core.training.examples import encode_row

REWRITES = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' and not loop.last %}...{% else %}{{ message.content }}{% endif %}<eos>"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Leaves out what the assistant has said before, as templates do with thoughts."""


def turn(role, content):
    return {"role": role, "content": content}


QUESTION = [turn("system", "be brief"), turn("user", "2+2?")]
ANSWER = [turn("assistant", "4")]
ASKED = "<system>be brief<eos>\n<user>2+2?<eos>\n<assistant>"


@pytest.fixture(scope="module")
def conversations(build):
    return build("example_tokenizers", "conversations")


@pytest.fixture(scope="module")
def preferences(build):
    return build("example_tokenizers", "preferences")


@pytest.fixture(scope="module")
def written(tokenizer):
    """A function from a trajectory to its text, and the parts of it that are learned."""

    def written(trajectory, tokenizer=tokenizer):
        pieces = tokenizer.convert_ids_to_tokens(trajectory.tokens["input_ids"].tolist())
        learned, parts = trajectory.tokens["loss_mask"].tolist(), []
        for place, piece in enumerate(pieces):
            if learned[place]:
                if place and learned[place - 1]:
                    parts[-1] += piece
                else:
                    parts.append(piece)
        return "".join(pieces), parts

    return written


@pytest.mark.parametrize(
    ("row", "text", "learned"),
    [
        ({"prompt": "2+2=", "completion": "4"}, "2+2=4<eos>", ["4<eos>"]),
        ({"prompt": "2+2=", "completion": ""}, "2+2=<eos>", ["<eos>"]),
        ({"prompt": "", "completion": "4"}, "4<eos>", ["4<eos>"]),
        ({"prompt": QUESTION, "completion": ANSWER}, ASKED + "4<eos>", ["4<eos>"]),
        ({"messages": [*QUESTION, *ANSWER]}, ASKED + "4<eos>", ["4<eos>"]),
        ({"messages": [*QUESTION, turn("assistant", "")]}, ASKED + "<eos>", ["<eos>"]),
        (
            {"messages": [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]},
            "<user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>",
            ["b<eos>", "d<eos>"],
        ),
        (
            {
                "prompt": [turn("user", "a"), turn("assistant", "b"), turn("user", "c")],
                "completion": [turn("assistant", "d")],
            },
            "<user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>",
            ["d<eos>"],
        ),
        (
            {
                "prompt": [turn("user", "a")],
                "completion": [turn("assistant", "b"), turn("tool", "c"), turn("assistant", "d")],
            },
            "<user>a<eos>\n<assistant>b<eos>\n<tool>c<eos>\n<assistant>d<eos>",
            ["b<eos>", "d<eos>"],
        ),
        # What comes after the last thing that is learned is left out.
        ({"messages": [*QUESTION[1:], *ANSWER, turn("user", "bye")]}, "<user>2+2?<eos>\n<assistant>4<eos>", ["4<eos>"]),
    ],
)
def test_which_tokens_are_learned(row, text, learned, conversations, tokenizer, written):
    (found,) = conversations(row, tokenizer)
    assert written(found) == (text, learned)
    assert int(found.sequence["finish_reason"]) == FinishReason.STOP
    assert (found.tokens["versions"] == -1).all()


def test_a_conversation_has_the_tokens_of_the_template(conversations, tokenizer):
    messages = [*QUESTION, *ANSWER, turn("user", "2 < 3, a|b {c}\n"), turn("assistant", "yes <user")]
    (found,) = conversations({"messages": messages}, tokenizer)
    whole = tokenizer.apply_chat_template(messages, return_dict=False)
    assert found.tokens["input_ids"].tolist() == whole[:-1], "all but the line break behind the last turn"


@pytest.mark.parametrize("content", ["<eos>", "a<eos>", "<user>x<assistant>", "<<eos>>"])
def test_content_that_spells_special_tokens_is_ordinary_text(content, conversations, tokenizer, written):
    """And the end token of an answer is there once, at its end."""
    for row in (
        {"prompt": content, "completion": content},
        {"messages": [turn("user", content), turn("assistant", content)]},
    ):
        (found,) = conversations(row, tokenizer)
        _, learned = written(found)
        assert learned == [content + "<eos>"]
        mask = found.tokens["loss_mask"]
        special = [token for token in found.tokens["input_ids"][mask].tolist() if token < 6]
        assert special == [tokenizer.eos_token_id]


@given(
    st.lists(st.tuples(st.sampled_from(["user", "assistant", "tool"]), st.text("ab<eos>\n ", max_size=8)), max_size=6)
)
def test_what_is_learned_is_what_the_assistant_said(conversations, tokenizer, written, turns):
    messages = [turn("user", "q"), *(turn(role, content) for role, content in turns), turn("assistant", "end")]
    merged = [m for n, m in enumerate(messages) if not (n and m["role"] == messages[n - 1]["role"] == "assistant")]
    (found,) = conversations({"messages": merged}, tokenizer)
    said = "".join(message["content"] + "<eos>" for message in merged if message["role"] == "assistant")
    assert "".join(written(found)[1]) == said


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"question": "a", "answer": "b"}, "'messages', or with 'prompt' and .*; this one has question, answer"),
        ({"prompt": "a"}, "this one has prompt"),
        ({"prompt": "a", "completion": None}, "this one has prompt, completion"),
        ({"prompt": QUESTION, "completion": []}, "'completion' is an empty list"),
        ({"prompt": QUESTION, "completion": [*QUESTION, *ANSWER]}, "the answer begins with a turn of the system"),
        ({"messages": "hello"}, "'messages' is text that is not JSON"),
        ({"messages": []}, "'messages' is an empty list"),
        ({"messages": [{"text": "hello"}]}, r"'messages'\[0\] has no role; it has text"),
        ({"messages": QUESTION}, "there is nothing to learn in it: no turn of the assistant"),
        ({"prompt": "", "completion": ""}, "nothing to learn in it"),
    ],
)
def test_what_cannot_be_learned_from_is_said(row, words, conversations, tokenizer):
    with pytest.raises(ValueError, match=words):
        conversations(row, tokenizer)


def test_a_template_that_rewrites_makes_a_sequence_of_each_turn(conversations, preferences, make_tokenizer, written):
    tokenizer = make_tokenizer(REWRITES)
    messages = [turn("user", "a"), turn("assistant", "b"), turn("user", "c"), turn("assistant", "d")]
    first, second = conversations({"messages": messages}, tokenizer)
    assert written(first, tokenizer) == ("<user>a<eos><assistant>b<eos>", ["b<eos>"])
    assert written(second, tokenizer) == ("<user>a<eos><assistant>...<eos><user>c<eos><assistant>d<eos>", ["d<eos>"])
    pair = {"prompt": messages[:1], "chosen": messages[1:], "rejected": [*messages[1:3], turn("assistant", "e")]}
    with pytest.raises(ValueError, match="rewrites earlier turns, so 2 turns of the assistant cannot be one sequence"):
        preferences(pair, tokenizer)
    (found,) = conversations({"prompt": messages[:3], "completion": messages[3:]}, tokenizer)
    assert written(found, tokenizer) == ("<user>a<eos><assistant>...<eos><user>c<eos><assistant>d<eos>", ["d<eos>"])


def test_text_needs_a_token_that_ends_it(conversations, make_tokenizer):
    with pytest.raises(ValueError, match="no end-of-sequence token"):
        conversations({"prompt": "a", "completion": "b"}, make_tokenizer(eos_token=None))


@pytest.mark.parametrize("name", ["conversations", "preferences"])
def test_what_is_too_long_is_refused_or_cut(name, build, tokenizer, written):
    row = {"prompt": "2+2=", "completion": "four", "chosen": "four", "rejected": "five"}
    fits = build("example_tokenizers", name, max_tokens=9)(row, tokenizer)
    assert written(fits[0]) == ("2+2=four<eos>", ["four<eos>"])
    with pytest.raises(ValueError, match=r"it has 9 tokens, but 8 are allowed by .*overlong to truncate"):
        build("example_tokenizers", name, max_tokens=8)(row, tokenizer)
    for cut in build("example_tokenizers", name, max_tokens=6, overlong="truncate")(row, tokenizer):
        assert written(cut)[1] in (["fo"], ["fi"])
        assert int(cut.sequence["finish_reason"]) == FinishReason.LENGTH
    with pytest.raises(ValueError, match="nothing to learn in it within the first 4 tokens, to which it was cut"):
        build("example_tokenizers", name, max_tokens=4, overlong="truncate")(row, tokenizer)


@pytest.mark.parametrize("name", ["conversations", "preferences"])
def test_without_a_length_it_is_the_models_context(name, build, make_tokenizer):
    row = {"prompt": "2+2=", "completion": "four", "chosen": "4", "rejected": "five"}
    assert build("example_tokenizers", name)(row, make_tokenizer(model_max_length=9))
    with pytest.raises(ValueError, match=r"it has 9 tokens, but 8 are allowed by .* or the model's context"):
        build("example_tokenizers", name)(row, make_tokenizer(model_max_length=8))
    assert build("example_tokenizers", name, overlong="skip")(row, make_tokenizer(model_max_length=8)) == []


TEXT = ("2+2=4<eos>", ["4<eos>"]), ("2+2=5<eos>", ["5<eos>"])
TALK = (
    (ASKED + "4<eos>", ["4<eos>"]),
    (ASKED + "5<eos>", ["5<eos>"]),
)
WRONG = [turn("assistant", "5")]


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, TEXT),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, TEXT),
        ({"prompt": QUESTION, "chosen": ANSWER, "rejected": WRONG}, TALK),
        ({"chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, *WRONG]}, TALK),
        ({"prompt": "2+2?", "chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, *WRONG]}, TALK),
        ({"prompt": None, "chosen": "2+2=4", "rejected": "2+2=5"}, TEXT),
        ({"chosen": "4", "rejected": "45"}, (("4<eos>", ["<eos>"]), ("45<eos>", ["5<eos>"]))),
        ({"chosen": "4", "rejected": "4"}, (("4<eos>", ["<eos>"]), ("4<eos>", ["<eos>"]))),
        (
            {"chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, *ANSWER]},
            (TALK[0], TALK[0]),
        ),
    ],
)
def test_the_formats_of_preferences(row, wanted, preferences, tokenizer, written):
    found = preferences(row, tokenizer)
    assert tuple(written(side) for side in found) == wanted
    assert [bool(side.sequence["is_chosen"]) for side in found] == [True, False]
    assert [float(side.sequence["margin"]) for side in found] == [0.0, 0.0]


def test_answers_of_several_turns_are_learned_from_where_they_part(preferences, tokenizer, written):
    common = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    row = {
        "chosen": [*common, turn("assistant", "d")],
        "rejected": [*common, turn("assistant", "e"), turn("user", "f")],
    }
    chosen, rejected = preferences(row, tokenizer)
    assert written(chosen) == ("<user>a<eos>\n<assistant>b<eos>\n<user>c<eos>\n<assistant>d<eos>", ["d<eos>"])
    assert written(rejected)[1] == ["e<eos>"]


def test_a_margin_is_of_both_sides(preferences, tokenizer):
    row = {"prompt": "2+2=", "chosen": "4", "rejected": "5"}
    for margin, wanted in ((2, 2.0), ("0.5", 0.5), (None, 0.0)):
        found = preferences({**row, "margin": margin}, tokenizer)
        assert [side.sequence["margin"] for side in found] == [torch.tensor(wanted)] * 2
    for margin in ("much", float("nan")):
        with pytest.raises(ValueError, match="it must be a number"):
            preferences({**row, "margin": margin}, tokenizer)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "a", "completion": "b"}, r"this one has prompt \(str\), completion \(str\)"),
        ({"prompt": "a", "chosen": "b"}, r"all as text, or all as lists of messages; this one has prompt \(str\)"),
        ({"prompt": "a", "chosen": "b", "rejected": WRONG}, r"chosen \(str\), rejected \(list\)"),
        ({"prompt": QUESTION, "chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, *WRONG]}, "a turn of the system"),
        ({"prompt": QUESTION, "chosen": [], "rejected": WRONG}, r"chosen \(list\)"),
        (
            {"chosen": [*QUESTION, *ANSWER], "rejected": [*QUESTION, turn("user", "5")]},
            "there is nothing to learn in it",
        ),
    ],
)
def test_another_format_is_named(row, words, preferences, tokenizer):
    with pytest.raises(ValueError, match=words):
        preferences(row, tokenizer)


def test_a_run_is_told_which_row_is_wrong(preferences, tokenizer):
    rows = [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "a"}, None]
    assert len(encode_row(rows, 0, partial(preferences, tokenizer=tokenizer))) == 2
    place = r"^row 1 of the data set \(counted from 0\) cannot be learned from: preferences need rows with 'chosen'"
    with pytest.raises(RunError, match=place):
        encode_row(rows, 1, partial(preferences, tokenizer=tokenizer))
    with pytest.raises(RunError, match="AttributeError: "):
        encode_row(rows, 2, partial(preferences, tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"messages": [*QUESTION, turn("assistant", None)]},
            r"'messages'\[2\] \(assistant\) has no content and calls",
        ),
        ({"messages": [turn("user", None), *ANSWER]}, r"'messages'\[0\] \(user\) has no content"),
        ({"messages": [turn("user", "\ud800 boo"), *ANSWER]}, r"half a character \(a lone surrogate\)"),
        ({"prompt": "a", "completion": "\ud800"}, r"half a character \(a lone surrogate\)"),
    ],
)
def test_what_is_no_text_is_refused_by_name(row, words, conversations, tokenizer):
    with pytest.raises(ValueError, match=words):
        conversations(row, tokenizer)
