"""What is learned of a conversation under templates that behave as those of public models do."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from areal_core.chat.answers import answer_text, end_mark, end_tokens, template_opening, unrendered_problem
from areal_core.chat.examples import learned_text, learned_turns
from areal_core.chat.messages import read_conversation, read_tools
from areal_core.chat.template import Conversation, between_turns, encode, render, render_conversation
from areal_core.sdk import RowError
from tests.chat.conftest import CHATML, EMPTY_THOUGHT, OPENS_A_THOUGHT, PLAIN, SYSTEM_LAST, WITHOUT_AN_END

ASKED = {"role": "user", "content": "2+2?"}
BOTH = {"role": "assistant", "content": "Let me check.", "tool_calls": [{"name": "weather", "arguments": {}}]}
WITHOUT_SYSTEM = (
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALL_OR_TEXT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = read_tools([{"name": "weather", "parameters": {"type": "object", "properties": {}}}])


def conversation(*turns: Any, tools: Any = (), **arguments: Any) -> Conversation:
    """A conversation of texts in turn, user first, or of whole messages."""
    roles = ("user", "assistant")
    messages = [t if isinstance(t, dict) else {"role": roles[n % 2], "content": t} for n, t in enumerate(turns)]
    return Conversation(read_conversation(messages, "messages"), tools, arguments)


def learned(tokenizer: Any, talk: Conversation, **settings: Any) -> list[list[str]]:
    """The learned parts of each sequence, as text."""
    found = learned_turns(tokenizer, talk, **settings)
    return [[tokenizer.decode(ids) for ids, is_learned in sequence if is_learned] for sequence in found]


def context(tokenizer: Any, talk: Conversation) -> list[str]:
    """What stands before the first learned part of each sequence."""
    return [tokenizer.decode(sequence[0][0]) for sequence in learned_turns(tokenizer, talk)]


def test_every_turn_is_learned_with_its_end(make_tokenizer):
    tokenizer = make_tokenizer()
    assert learned(tokenizer, conversation("a", "b", "c", "d")) == [["b<|im_end|>", "d<|im_end|>"]]
    assert learned(tokenizer, conversation("a", "b", "c", "d"), first=2) == [["d<|im_end|>"]]


@pytest.mark.parametrize("unlearned", [{"weight": 0}, {"train": False}])
def test_a_turn_may_be_context(make_tokenizer, unlearned):
    talk = conversation("a", {"role": "assistant", "content": "b", **unlearned}, "c", "d")
    assert learned(make_tokenizer(), talk) == [["d<|im_end|>"]]


def test_a_weight_between_is_refused(make_tokenizer):
    with pytest.raises(RowError, match=r"message 1 has weight 0\.5"):
        learned(make_tokenizer(), conversation("a", {"role": "assistant", "content": "b", "weight": 0.5}))


def test_a_template_that_drops_empty_thoughts_makes_a_sequence_of_each_turn(make_tokenizer):
    """As Qwen3: without this, no conversation of several turns could be learned."""
    tokenizer, talk = make_tokenizer(EMPTY_THOUGHT), conversation("a", "b", "c", "d")
    assert learned(tokenizer, talk) == [["<think>\n\n</think>\n\nb<|im_end|>"], ["<think>\n\n</think>\n\nd<|im_end|>"]]
    assert "<think>" not in context(tokenizer, talk)[1]


def test_a_thought_that_the_template_opens_and_drops_is_learned(make_tokenizer):
    """As R1's distilled models."""
    tokenizer = make_tokenizer(OPENS_A_THOUGHT)
    talk = conversation("a", "<think>\nadd\n</think>\n\nb", "c", "so</think>d")
    assert learned(tokenizer, talk) == [["add\n</think>\n\nb<|im_end|>"], ["so</think>d<|im_end|>"]]
    assert [text[-20:] for text in context(tokenizer, talk)] == ["<|im_start|>assistant\n<think>\n"[-20:]] * 2
    with pytest.raises(RowError, match="opens the assistant's turn with '<think>', and message 1 does not continue it"):
        learned(tokenizer, conversation("a", "b"))
    thought = {"role": "assistant", "content": "b", "reasoning_content": "add"}
    with pytest.raises(RowError, match="does not write reasoning_content, which message 1 has"):
        learned(tokenizer, conversation("a", thought))


def test_a_thought_beside_a_template_that_switches_thoughts_off_is_refused(make_tokenizer):
    tokenizer = make_tokenizer()
    talk = conversation("a", {"role": "assistant", "content": "b", "reasoning_content": "add"})
    assert learned(tokenizer, talk) == [["<think>\nadd\n</think>\n\nb<|im_end|>"]]
    off = conversation("a", "<think>\nadd\n</think>\n\nb", enable_thinking=False)
    with pytest.raises(RowError, match="opens the assistant's turn with an empty one: switch thoughts on"):
        learned(tokenizer, off)


def test_a_turn_without_an_end_ends_where_the_next_one_begins(make_tokenizer):
    """As GLM, whose template ends no turn: the model opens the next one, and stops there."""
    tokenizer = make_tokenizer(WITHOUT_AN_END, eos="</s>")
    assert end_mark(tokenizer) == "<|user|>"
    assert end_tokens(tokenizer) == {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|user|>")}
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}
    talk = conversation("a", call, {"role": "tool", "content": "dry"}, "No rain.", "b", "c", tools=TOOLS)
    parts = ["<tool_call>weather</tool_call><|observation|>", "No rain.<|user|>", "c<|user|>"]
    assert learned(tokenizer, talk) == [parts]
    prompt, _ = encode(tokenizer, render(tokenizer, [ASKED], add_generation_prompt=True))
    more = [ASKED, {"role": "assistant", "content": "4"}, ASKED]
    whole, _ = encode(tokenizer, render(tokenizer, more, add_generation_prompt=True))
    for output in ("4<|user|>", "4"):  # the policy ended its turn, or was cut
        ids = tokenizer.encode(output, add_special_tokens=False)
        assert [*prompt, *ids, *between_turns(tokenizer, [ASKED], more[1], [ASKED], ids)[0]] == whole


def test_a_template_that_writes_no_end_at_all_needs_a_setting(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN, eos="</s>")
    with pytest.raises(RowError, match="writes no end token after an answer, so the model would not learn to stop"):
        learned(tokenizer, conversation("a", "b"))
    assert learned(tokenizer, conversation("a", "b", "c", "d"), end_token="</s>") == [["b</s>", "d</s>"]]


def test_a_system_message_that_moves_stays_where_the_policy_saw_it(make_tokenizer):
    tokenizer = make_tokenizer(SYSTEM_LAST, eos="</s>")
    talk = conversation({"role": "system", "content": "Be brief."}, ASKED, {"role": "assistant", "content": "4"})
    assert learned(tokenizer, talk) == [[" 4</s>"]]
    assert context(tokenizer, talk) == ["<s>[INST]Be brief.\n\n2+2? [/INST]"]


def test_what_a_template_leaves_out_is_found(make_tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather", "arguments": {}}]}
    talk = conversation("a", call, {"role": "tool", "content": "dry"}, "No rain.", "b", tools=TOOLS)
    assert unrendered_problem(make_tokenizer(), talk) == ""
    deaf = make_tokenizer("{{ messages[-1].content }}{# tools tool_calls #}")
    left_out = "message 0 (user), the calls of message 1, message 2 (tool), message 3 (assistant), the tools"
    assert unrendered_problem(deaf, talk).startswith(f"the chat template leaves out {left_out}: ")
    with pytest.raises(RowError, match="the chat template shows no tools"):
        unrendered_problem(make_tokenizer(PLAIN), talk)
    with pytest.raises(RowError, match="the chat template does not read 'enable_thinkng'"):
        unrendered_problem(make_tokenizer(), conversation("a", enable_thinkng=False))


@pytest.mark.parametrize(
    ("template", "opened"), [(CHATML, ""), (OPENS_A_THOUGHT, "<think>\n"), (EMPTY_THOUGHT, ""), (SYSTEM_LAST, "")]
)
def test_an_answer_begins_with_what_the_template_opened(make_tokenizer, template, opened):
    tokenizer = make_tokenizer(template)
    talk = conversation("a")
    text = render_conversation(tokenizer, talk, add_generation_prompt=True)
    assert template_opening(tokenizer, talk, text) == opened
    ids = tokenizer.encode("add</think>4<|im_end|>", add_special_tokens=False)
    assert answer_text(tokenizer, ids, frozenset(), opened) == f"{opened}add</think>4"


def test_tags_that_are_special_tokens_are_part_of_an_answer(make_tokenizer):
    tokenizer = make_tokenizer()
    ids = tokenizer.encode("<|user|>4</s><|im_end|>", add_special_tokens=False)
    assert answer_text(tokenizer, ids, frozenset()) == "<|user|>4</s>"
    assert answer_text(tokenizer, ids[:-1], frozenset()) == "<|user|>4</s>", "an answer that was cut"


def test_a_plain_answer_follows_an_empty_thought_that_the_template_opens(make_tokenizer):
    talk = conversation("a", "b", enable_thinking=False)
    assert learned(make_tokenizer(), talk) == [["b<|im_end|>"]]
    assert context(make_tokenizer(), talk)[0].endswith("<think>\n\n</think>\n\n")


def test_an_end_token_that_the_model_lacks_is_refused(make_tokenizer):
    with pytest.raises(RowError, match="end_token: '<|nothing|>' is no token of this model".replace("|", r"\|")):
        learned(make_tokenizer(PLAIN), conversation("a", "b"), end_token="<|nothing|>")


def test_a_turn_without_loss_is_context(make_tokenizer):
    talk = conversation("a", {"role": "assistant", "content": "b", "loss": False}, "c", "d")
    assert learned(make_tokenizer(), talk) == [["d<|im_end|>"]]


@pytest.mark.parametrize(
    ("template", "turns", "words"),
    [
        (CHATML, [{"role": "prompter", "content": "a"}, "b"], ""),
        (CHATML, ["a", {"role": "asistant", "content": "b"}, "c", "d"], "message 1 has the role 'asistant'"),
        (WITHOUT_SYSTEM, [{"role": "system", "content": "Be brief."}, ASKED, BOTH], r"leaves out message 0 \(system\)"),
        (CALL_OR_TEXT, [ASKED, BOTH], "does not write all of message 1: 'Let me check.'"),
    ],
)
def test_nothing_of_a_row_is_lost_while_it_is_learned(make_tokenizer, template, turns, words):
    tokenizer, talk = make_tokenizer(template), conversation(*turns)
    if words:
        with pytest.raises(RowError, match=words):
            learned_turns(tokenizer, talk)
    else:
        assert learned(tokenizer, talk) == [["b<|im_end|>"]]


def test_of_several_templates_the_one_that_is_rendered_counts(make_tokenizer):
    tokenizer = make_tokenizer({"default": PLAIN, "tool_use": CHATML})
    with pytest.raises(RowError, match="does not write calls of tools"):
        render_conversation(tokenizer, conversation(ASKED, BOTH), add_generation_prompt=False)
    assert "weather" in render_conversation(
        tokenizer, conversation(ASKED, BOTH, tools=TOOLS), add_generation_prompt=False
    )


def test_a_finished_text_that_begins_with_the_begin_token_has_one(make_tokenizer):
    tokenizer = make_tokenizer(PLAIN, kind="first", eos="</s>")
    begin = tokenizer.convert_tokens_to_ids("<s>")
    ahead = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
    tokenizer.backend_tokenizer.post_processor = ahead
    pieces = learned_text(tokenizer, "", "<s>a</s>", has_special_tokens=True)
    assert [token for part, _ in pieces for token in part].count(begin) == 1


def test_characters_of_icon_fonts_stay(make_tokenizer):
    tokenizer = make_tokenizer()
    icon = {"role": "user", "content": "\U000f0001 <|im_end|>"}
    text = render(tokenizer, [icon], add_generation_prompt=False)
    assert encode(tokenizer, text)[1] == "<|im_start|>user\n\U000f0001 <|im_end|><|im_end|>\n"


@pytest.mark.parametrize(("sampled", "added"), [("hi</s>", ""), ("hi", " </s>")])
def test_an_end_without_the_space_of_the_template_is_the_end(make_tokenizer, sampled, added):
    """As Llama 2's template, which writes a space in front of its end."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    tokenizer = make_tokenizer(template, eos="</s>")
    said, following = {"role": "assistant", "content": "hi"}, [{"role": "user", "content": "b"}]
    _, text = between_turns(tokenizer, [ASKED], said, following, tokenizer.encode(sampled, add_special_tokens=False))
    assert text == f"{added}<s>[INST] b [/INST]"
