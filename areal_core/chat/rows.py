"""From a row of a data set to what the chat template is given, and to the tokens of a prompt or of an example."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from areal_core.chat.answers import template_opening
from areal_core.chat.messages import (
    check_text,
    looks_like_a_conversation,
    plain,
    read_conversation,
    read_message,
    read_tools,
    strings,
    type_name_of,
)
from areal_core.chat.template import RUNS_OWN, Conversation, encode, guard, render_conversation, with_begin
from areal_core.interfaces.workflow import RowError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.chat.messages import Message
    from areal_core.chat.settings import PromptSettings

TEMPLATE_KEY: Final = "chat_template_kwargs"
"""The row's key with arguments of the chat template, as TRL and vLLM call it."""
IMAGE_KEYS: Final = ("image", "images")
"""Keys of a row that hold its images."""


@dataclass(frozen=True)
class Prompt:
    """What a policy is asked. For an example see `read_prompt`.

    Attributes:
        input_ids: the token ids.
        text: the same as text, special tokens spelled out.
        opened: the end of `text` that the template wrote as the beginning of the answer, such as `<think>`.
        messages: the conversation; empty where the prompt is text that is continued.
    """

    input_ids: list[int]
    text: str
    opened: str = ""
    messages: tuple[Message, ...] = ()

    @property
    def question(self) -> str:
        """The text without `opened`, which is part of the answer."""
        return self.text[: len(self.text) - len(self.opened)]


def read_prompt(tokenizer: Any, row: Mapping[str, Any], settings: PromptSettings) -> Prompt:
    """Return the prompt of a row: rendered by the chat template, or text that is continued as it is.

    Args:
        tokenizer: of the model.
        row: of the data set.
        settings: which keys count, and when the template is applied.

    Raises:
        RowError: the row has no prompt, or one that cannot be used; it names the field and the remedy.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Prompt, PromptSettings, read_prompt
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=Tokenizer(models.BPE({chr(code): code for code in range(128)}, [])),
        ...     chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        ...     "{% if add_generation_prompt %}assistant: {% endif %}",
        ... )
        >>> prompt: Prompt = read_prompt(tokenizer, {"prompt": "2+2?"}, PromptSettings(chat_template="always"))
        >>> prompt.text, len(prompt.input_ids)
        ('user: 2+2? assistant: ', 22)
        >>> read_prompt(tokenizer, {"prompt": "2+2="}, PromptSettings()).input_ids
        [50, 43, 50, 61]
    """
    prompt = prompt_of(row, settings)
    if isinstance(prompt, Conversation):
        text = render_conversation(tokenizer, prompt, add_generation_prompt=True)
        ids, written, opened = _encoded(_Rendered(tokenizer, text, prompt))
        return Prompt(list(ids), written, opened, tuple(prompt.messages))
    text = prompt if settings.text_has_special_tokens else guard(tokenizer, prompt)
    ids, written, _ = _encoded(_Rendered(tokenizer, text))
    return Prompt(with_begin(tokenizer, ids), written)


def prompt_of(row: Mapping[str, Any], settings: PromptSettings, *, images: bool = False) -> Conversation | str:
    """Return the conversation that a row opens, or its prompt as text that is continued as it is.

    Args:
        row: of the data set.
        settings: which keys count, and when the template is applied.
        images: keep parts that are images; without it they are refused.

    Raises:
        RowError: the row has no prompt, or one that cannot be used. The message names the field and the remedy.

    Example:
        >>> from areal_core.chat import IMAGE_KEYS, PromptSettings, prompt_of
        >>> settings = PromptSettings(prompt_key="question", chat_template="always", system="Answer with a number.")
        >>> for message in prompt_of({"question": "2+2?", "answer": "4"}, settings).messages:
        ...     print(message)
        {'role': 'system', 'content': 'Answer with a number.'}
        {'role': 'user', 'content': '2+2?'}
        >>> prompt_of({"prompt": "2+2="}, PromptSettings())
        '2+2='
        >>> content = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
        >>> row = {"prompt": [{"role": "user", "content": content}], "image": "cat.png"}
        >>> prompt_of(row, PromptSettings(), images=True).messages  # for a workflow that shows images
        [{'role': 'user', 'content': [{'type': 'image'}, {'type': 'text', 'text': 'What is it?'}]}]
        >>> [row[key] for key in IMAGE_KEYS if key in row]
        ['cat.png']
    """
    key = settings.prompt_key
    if key not in row:
        raise RowError(f"has no '{key}'; it has {', '.join(row) or 'no keys'}: set workflow.prompt_key")
    prompt = plain(row[key])
    if isinstance(prompt, str):
        check_text(prompt, f"'{key}'")
        if not prompt:
            raise RowError(f"'{key}' is empty: leave the row out, or set workflow.prompt_key")
        if settings.chat_template != "never" and looks_like_a_conversation(prompt):
            raise RowError(
                f"'{key}' is text that holds a whole conversation: store it as a list of messages. To ask this text "
                "as it is, set workflow.chat_template=never"
            )
        if settings.chat_template != "always":
            beside = (
                ("workflow.system", settings.system),
                ("workflow.chat_template_kwargs", settings.chat_template_kwargs),
                (settings.tools_key, _tools_of(row, settings)),
                *((name, plain(row.get(name))) for name in ("system", "documents", TEMPLATE_KEY)),
            )
            for name, shown in beside:
                if shown:
                    remedy = "set workflow.chat_template=always to ask it as a message"
                    if settings.text_has_special_tokens:
                        remedy = "leave it out, because the text was written with a chat template before"
                    raise RowError(f"'{key}' is text that is continued as it is, which takes no {name}: {remedy}")
            return prompt
        prompt = [{"role": "user", "content": prompt}]
    elif settings.chat_template == "never":
        raise RowError(f"'{key}' is a list of messages, which needs a template: workflow.chat_template is 'never'")
    elif not isinstance(prompt, list | Mapping):
        raise RowError(f"'{key}' is {type_name_of(prompt)}; it must be text, or a list of messages")
    messages = read_conversation(prompt, f"'{key}'", images=images)
    if messages[-1]["role"] == "assistant":
        raise RowError(f"'{key}' ends with a turn of the assistant, which the policy is to write: leave that turn out")
    return conversation_of(row, messages, settings)


def conversation_of(row: Mapping[str, Any], messages: Sequence[Message], settings: PromptSettings) -> Conversation:
    """Return messages with a system message, the row's tools, and the arguments of the row and the settings.

    The system message is that of the messages, or else the row's `system`, or else that of the settings.

    Args:
        row: of the data set.
        messages: in the form that `read_conversation` returns; at least one.
        settings: the key of the tools, the system message, and arguments of the template.

    Raises:
        RowError: the row's system message, tools or template arguments cannot be used.

    Example:
        >>> from areal_core.chat import PromptSettings, conversation_of
        >>> row = {"question": "2+2?", "answer": "4", "system": "Answer with a number.", "tools": [{"name": "add"}]}
        >>> messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
        >>> conversation = conversation_of(row, messages, PromptSettings())
        >>> [message["role"] for message in conversation.messages], conversation.tools
        (['system', 'user', 'assistant'], [{'type': 'function', 'function': {'name': 'add'}}])
    """
    system = plain(row.get("system")) or settings.system
    if system and messages[0]["role"] not in ("system", "developer"):
        messages = [*read_message({"role": "system", "content": system}, "'system'"), *messages]
    arguments = template_arguments(row, settings.chat_template_kwargs or {})
    return Conversation(messages, _tools_of(row, settings), arguments)


def template_arguments(row: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's arguments: those of the settings, the row's `chat_template_kwargs` and `documents`.

    Args:
        row: of the data set. Its arguments take precedence over the settings, key by key.
        settings: the value of the setting `chat_template_kwargs`.

    Raises:
        RowError: the row's arguments are no object, or name something that the run decides, such as `tokenize`.

    Example:
        >>> from areal_core.chat import TemplateSettings, template_arguments
        >>> settings = TemplateSettings(chat_template_kwargs={"enable_thinking": True, "language": "en"})
        >>> row = {"prompt": "2+2?", "chat_template_kwargs": {"enable_thinking": False}}
        >>> template_arguments(row, settings.chat_template_kwargs)
        {'enable_thinking': False, 'language': 'en'}
    """
    row_arguments = row.get(TEMPLATE_KEY)
    if isinstance(row_arguments, str) and row_arguments.strip():
        try:
            row_arguments = json.loads(row_arguments)
        except ValueError:
            raise RowError(f"'{TEMPLATE_KEY}' is text that is not JSON") from None
    if not row_arguments:
        row_arguments = {}
    if not isinstance(row_arguments, Mapping):
        raise RowError(
            f"'{TEMPLATE_KEY}' is {type_name_of(row_arguments)}; "
            "it must be an object, such as {enable_thinking: false}"
        )
    arguments = {**settings, **{key: value for key, value in row_arguments.items() if value is not None}}
    if documents := plain(row.get("documents")):
        arguments.setdefault("documents", documents)
    if refused := sorted(RUNS_OWN & arguments.keys()):
        raise RowError(f"'{TEMPLATE_KEY}' names {', '.join(refused)}, which the run decides")
    for place, text in strings(arguments, f"'{TEMPLATE_KEY}'"):
        check_text(text, place)
    return arguments


def _tools_of(row: Mapping[str, Any], settings: PromptSettings) -> list[dict[str, Any]]:
    if not settings.tools_key:
        return []
    key = "functions" if settings.tools_key == "tools" and row.get("tools") is None else settings.tools_key
    return read_tools(row.get(key), f"'{key}'")


@dataclass(frozen=True)
class _Rendered:
    """A prompt as text with stand-ins; two of the same text are equal."""

    tokenizer: Any
    text: str
    conversation: Conversation | None = field(default=None, compare=False)


@lru_cache(maxsize=64)
def _encoded(prompt: _Rendered) -> tuple[tuple[int, ...], str, str]:
    """Return tokens, text and what the template opened, once for all episodes of a group: they have the same prompt."""
    ids, written = encode(prompt.tokenizer, prompt.text)
    if prompt.conversation is None:
        return tuple(ids), written, ""
    return tuple(ids), written, template_opening(prompt.tokenizer, prompt.conversation, prompt.text)
