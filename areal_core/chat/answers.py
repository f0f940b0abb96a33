"""Answers: which tokens end one, and the text of one as its author wrote it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from areal_core.chat.template import (
    PROBE,
    Conversation,
    encode,
    end_of_turn,
    leading_special_token,
    render,
    render_conversation,
    special_tokens,
    spelled_out,
    template_text,
)
from areal_core.interfaces.workflow import RowError

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


_OPEN_TAG: Final = re.compile(r"<[a-z_]+>\s*$")
"""A tag such as `<think>` at the end of a text. Special tokens have other forms: `<|im_start|>`."""


def end_tokens(tokenizer: Any, named: Collection[int] = ()) -> frozenset[int]:
    """Return the tokens that end an answer.

    They are the tokenizer's end token, those that the model's generation config names, and the special token that the
    chat template writes after an assistant's turn. A base model with a chat template has only the last one there: its
    own end token ends a document.

    Args:
        tokenizer: of the model.
        named: ids in the model's generation config.
    """
    tokenizers_end = getattr(tokenizer, "eos_token_id", None)
    ends = {*named, *(() if tokenizers_end is None else (tokenizers_end,))}
    if mark := end_mark(tokenizer):
        ends.add(encode(tokenizer, mark)[0][0])
    return frozenset(ends)


def end_mark(tokenizer: Any, conversation: Conversation | None = None) -> str:
    """Return the special token that the chat template writes first after an assistant's turn; empty if there is none.

    Models whose template writes no end (GLM) end their turn by opening the next one: there it is the token that the
    template writes before a user's turn.

    Args:
        tokenizer: of the model.
        conversation: gives the template its arguments and tools; its messages do not matter.
    """
    if not template_text(tokenizer):
        return ""
    arguments = conversation.template_arguments if conversation is not None else {}
    try:
        end = end_of_turn(tokenizer, **arguments)
        if not end:
            roles = ("user", "assistant", "user")
            text = render(
                tokenizer, [{"role": r, "content": PROBE} for r in roles], add_generation_prompt=True, **arguments
            )
            return leading_special_token(tokenizer, text.split(PROBE)[2])
    except (RowError, IndexError):  # a template that takes no short conversation, such as one that insists on images
        return ""
    places = [(end.find(spelling), spelling) for spelling in special_tokens(tokenizer) if spelling in end]
    return min(places, key=lambda item: (item[0], -len(item[1])))[1] if places else ""


def template_opening(tokenizer: Any, conversation: Conversation, text: str) -> str:
    """Return the end of a prompt that belongs to the answer: what the template writes only to open the policy's turn.

    Templates of reasoning models open the thought, so that the model's own tokens have no `<think>`. It is what the
    opened turn has beyond the beginning of an assistant's turn that is over, or a tag that is left open at the end.

    For an example see `answer_text`.

    Args:
        tokenizer: of the model.
        conversation: the conversation that the policy continues.
        text: its rendering by `render_conversation`, with `add_generation_prompt`.
    """
    past = [*conversation.messages, {"role": "assistant", "content": PROBE}]
    try:
        written = render(tokenizer, past, add_generation_prompt=False, **conversation.template_arguments)
    except RowError:
        return ""
    beginning = written.rpartition(PROBE)[0]
    if beginning and text.startswith(beginning):
        return spelled_out(tokenizer, text[len(beginning) :])
    tag = _OPEN_TAG.search(text)
    return tag[0] if tag is not None else ""


def answer_text(tokenizer: Any, output_ids: Sequence[int], ends: Collection[int], opened: str = "") -> str:
    """Return an answer as text: what the template opened, and all that was sampled before the end token.

    Special tokens that the policy wrote inside its answer are spelled out, because formats use them as tags.

    Args:
        tokenizer: of the model.
        output_ids: sampled tokens, the end token included.
        ends: ids of the tokens that end an answer, such as `WorkflowContext.end_ids`. If empty: the tokenizer's end
            token, and the one that the chat template writes after an answer.
        opened: see `template_opening`.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Conversation, answer_text, end_mark, render_conversation, template_opening
        >>> letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
        >>> letters.decoder = decoders.Fuse()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=letters,
        ...     eos_token="<end>",
        ...     chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
        ...     "{% if add_generation_prompt %}assistant: <think>{% endif %}",
        ... )
        >>> conversation = Conversation([{"role": "user", "content": "2+2?"}])
        >>> prompt = render_conversation(tokenizer, conversation, add_generation_prompt=True)
        >>> opened = template_opening(tokenizer, conversation, prompt)
        >>> opened, end_mark(tokenizer)
        ('<think>', '<end>')
        >>> answer_text(tokenizer, tokenizer.encode("two pairs</think>4<end>"), [tokenizer.eos_token_id], opened)
        '<think>two pairs</think>4'
    """
    ends = ends or end_tokens(tokenizer)
    count = len(output_ids)
    while count and output_ids[count - 1] in ends:
        count -= 1
    return opened + str(tokenizer.decode(list(output_ids[:count]), skip_special_tokens=False))


def ends_with_a_token(tokenizer: Any, text: str) -> bool:
    """Return whether a text ends with a special token, the line breaks after it left out."""
    return text.rstrip("\n").endswith(special_tokens(tokenizer))


def unrendered_problem(tokenizer: Any, conversation: Conversation) -> str:
    """Return a sentence about what the template leaves out of a conversation; empty if it shows everything.

    For messages see `left_out_messages`. Tools and calls count as shown if the rendering changes without them.

    Args:
        tokenizer: of the model.
        conversation: in the form that `read_conversation` returns.

    Raises:
        RowError: the template refuses the conversation.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Conversation, unrendered_problem
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=Tokenizer(models.BPE({chr(code): code for code in range(128)}, [])),
        ...     chat_template="{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
        ... )
        >>> messages = [{"role": "system", "content": "Answer with a number."}, {"role": "user", "content": "2+2?"}]
        >>> unrendered_problem(tokenizer, Conversation(messages))
        'the chat template leaves out message 0 (system): take another template, or change the row'
    """
    text = render_conversation(tokenizer, conversation, add_generation_prompt=True)
    messages = conversation.messages
    left_out, missing = left_out_messages(tokenizer, conversation, text), []
    for number, message in enumerate(messages):
        if number in left_out:
            missing.append(f"message {number} ({message['role']})")
        if message.get("tool_calls"):
            plain = {key: value for key, value in message.items() if key != "tool_calls"}
            without = conversation.with_messages([*messages[:number], plain, *messages[number + 1 :]])
            if _is_rendered_as(tokenizer, without, text):
                missing.append(f"the calls of message {number}")
    if conversation.tools and _is_rendered_as(tokenizer, Conversation(messages, (), conversation.arguments), text):
        missing.append("the tools")
    return left_out_problem(missing)


def left_out_problem(missing: Sequence[str]) -> str:
    """Return the sentence about parts that a template leaves out, such as `message 0 (system)`; empty for none."""
    if not missing:
        return ""
    return f"the chat template leaves out {', '.join(missing)}: take another template, or change the row"


def left_out_messages(tokenizer: Any, conversation: Conversation, text: str) -> list[int]:
    """Return the numbers of the messages whose content is not in a rendering.

    A message counts as shown if half of its words are there, because templates trim and escape, and drop old thoughts.

    Args:
        tokenizer: of the model.
        conversation: in the form of `chat.messages`.
        text: the rendering, with stand-ins.
    """
    words = _words(spelled_out(tokenizer, text))
    left_out = []
    for number, message in enumerate(conversation.messages):
        content = message.get("content")
        content_words = _words(content.rpartition("</think>")[2] if isinstance(content, str) else "")
        if content_words and len(content_words & words) * 2 < len(content_words):
            left_out.append(number)
    return left_out


def _is_rendered_as(tokenizer: Any, conversation: Conversation, text: str) -> bool:
    try:
        return render_conversation(tokenizer, conversation, add_generation_prompt=True) == text
    except RowError:
        return False


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))
