"""Parse sampled tokens into a message with reasoning, text and tool calls, in the format of the model family."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from transformers.utils.chat_parsing import ResponseParser

from areal_agents.token_texts import TokenTexts
from areal_agents.typed_arguments import typed_arguments
from areal_core.chat import read_arguments, read_json

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.chat import Message
    from areal_core.data import Generation

_OPENING_TOKENS: Final = 16
"""Tokens at the end of a prompt that are checked for an opened `<think>` tag."""
ANCHOR: Final = "\x02answer\x02"
"""Marks where parsing starts: before the text that the chat template opened the turn with."""
REASONING: Final = {"open": "<think>", "close": "</think>", "content": "text", "repeats": True, "join": "\n"}
CONTENT: Final = {"content": "text", "repeats": True, "join": "\n"}


def _form(**calls: Any) -> dict[str, Any]:
    """Return a response template of transformers. It keeps the text of calls, so that malformed ones can be counted."""
    fields = {"reasoning_content": REASONING, "content": CONTENT}
    if calls:
        fields["calls"] = {"content": "text", "repeats": True, **calls}
    return {"start_anchor": ANCHOR, "fields": fields}


FORMS: Final[Mapping[str, dict[str, Any]]] = {
    "xml": _form(open="<tool_call>", close="</tool_call>"),
    "hermes": _form(open="<tool_call>", close="</tool_call>"),
    "mistral": _form(open="[TOOL_CALLS]", close_pattern=r"(?=\[TOOL_CALLS\])"),
    "llama": _form(open="<|python_tag|>", close="<|eom_id|>"),
    "none": _form(),
}
"""Response templates by tool-call format."""
SIGNS: Final = {"<function=": "xml", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama"}
"""Formats by a marker in the chat template, in the order in which they are checked."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the policy, parsed.

    Attributes:
        message: the answer as an assistant message. Calls have ids, and their arguments are objects.
        malformed: number of calls that could not be parsed. They stay in the text.
    """

    message: Message
    malformed: int = 0

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Tool calls of the message."""
        return list(self.message.get("tool_calls", ()))

    @property
    def acts(self) -> bool:
        """Whether the policy calls a tool, or has tried to."""
        return bool(self.calls or self.malformed)


class AnswerReader:
    """Parses the answers of one model.

    Args:
        tokenizer: tokenizer of the model. With `form="auto"` its `response_template` is used if it has one.
        form: key of `FORMS`, or "auto" to detect the format from the chat template.
        chat_template: replaces the chat template of the tokenizer. None: keep the tokenizer's.

    Attributes:
        tokenizer: the tokenizer, with the chat template that conversations use.
        form: key of `FORMS` that is in use.
    """

    def __init__(self, tokenizer: Any, form: str = "auto", chat_template: str | None = None) -> None:
        if chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template
        self.tokenizer = tokenizer
        self._response_template = getattr(tokenizer, "response_template", None) if form == "auto" else None
        template = str(getattr(tokenizer, "chat_template", "") or "")
        detected = next((name for sign, name in SIGNS.items() if sign in template), "none")
        self.form = detected if form == "auto" else form
        self._ends = {*getattr(tokenizer, "all_special_ids", ())}
        self._texts = TokenTexts(tokenizer)

    @property
    def has_own_template(self) -> bool:
        """Whether the tokenizer's `response_template` parses the answers."""
        return self._response_template is not None

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=False))

    def without_end(self, ids: Sequence[int]) -> Sequence[int]:
        """Return an answer's tokens without the special tokens at its end."""
        count = len(ids)
        while count and ids[count - 1] in self._ends:
            count -= 1
        return ids[:count]

    def begun(self, prompt_ids: Sequence[int]) -> str:
        """Return the text with which the chat template has opened the policy's turn: "<think>", or empty."""
        opened = self.decode(prompt_ids[-_OPENING_TOKENS:]).rstrip()
        return "<think>" if opened.endswith("<think>") else ""

    def logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the log-probabilities of the sampled tokens, in the format of OpenAI's chat completions."""
        pieces = self._texts.of(generation.output_ids)
        return [
            {"token": text, "logprob": logprob, "bytes": written, "top_logprobs": []}
            for (text, written), logprob in zip(pieces, generation.logprobs, strict=True)
        ]

    def read(
        self,
        generation: Generation,
        begun: str = "",
        tools: Sequence[Any] = (),
        stop: Sequence[str] = (),
        first_call: int = 0,
    ) -> Answer:
        """Parse a generation into a message.

        Args:
            generation: the sampled tokens.
            begun: text that the chat template has opened the turn with; see `begun`.
            tools: tools that the agent offers. Without tools, calls are left as text.
            stop: texts at which the answer ends. They are not part of the message.
            first_call: index of the answer's first call among all calls of the episode; call ids count from it.
        """
        text = self.decode(self.without_end(generation.output_ids))
        if positions := [position for ending in stop if (position := text.find(ending)) >= 0]:
            text = text[: min(positions)]
        if self._response_template is not None:
            parser = ResponseParser(self._response_template, prefix="")
        else:
            parser = ResponseParser(FORMS[self.form if tools else "none"], prefix=ANCHOR + begun)
        try:
            events = parser.feed(text)
            parsed, last_events = parser.finalize()
            written = [_template_call(call, tools) for call in parsed.get("tool_calls", ())]
        except Exception:  # noqa: BLE001 - a tokenizer's own template may raise any error on text that does not match
            return Answer({"role": "assistant", "content": text}, 1)
        if self._response_template is None:
            regions = [(e["field"], e["value"]) for e in [*events, *last_events] if e["type"] == "region_close"]
        else:
            regions = [("content", parsed.get("content") or "")]
        return self._message(regions, parsed.get("reasoning_content") or "", written, tools, first_call)

    def _message(
        self,
        regions: Sequence[tuple[str, str]],
        thought: str,
        written: list[Call],
        tools: Sequence[Any],
        first_call: int,
    ) -> Answer:
        """Return the message for an answer's regions. Calls that cannot be parsed stay in the text, in their place."""
        texts, calls, malformed = [], [], 0
        for field, text in regions:
            if field == "content":
                texts.append(text)
            elif field == "calls":
                read = _READERS[self.form](text, tools)
                if not read:
                    malformed += 1
                    texts.append(text)
                written += read
        content = "\n".join(filter(None, texts))
        if self.form == "llama" and tools and not written and (read := _json_calls(content, tools)):
            content, written = "", read  # Llama omits the tag for the user's own functions
        for number, (name, arguments) in enumerate(written, first_call):
            function = {"name": name, "arguments": arguments}
            # Mistral's templates require ids of nine letters and digits.
            calls.append({"id": f"call{number:05d}", "type": "function", "function": function})
        message: Message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return Answer(message, malformed)


Call = tuple[str, Any]


def _template_call(call: Any, tools: Sequence[Any]) -> Call:
    """Return a call that the tokenizer's response template has parsed. Raises an error if JSON cannot encode it."""
    function = read_json(json.dumps(call))  # the chat template will have to encode the call again
    function = function.get("function", function)
    name, arguments = function["name"], read_arguments(function.get("arguments"))
    return name, typed_arguments(name, arguments, tools) if isinstance(arguments, dict) else arguments


def _json_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """Parse `{"name": ..., "arguments": {...}}`, or a list of such objects. Return no calls if one is malformed."""
    del tools
    try:
        decoded = read_json(text)
    except ValueError:
        return []
    calls = []
    for call in decoded if isinstance(decoded, list) else [decoded]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = read_arguments(call.get("arguments", call.get("parameters")))
        if not isinstance(arguments, dict):
            return []
        calls.append((call["name"], arguments))
    return calls


def _mistral_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """Parse a JSON list of calls, or `name[ARGS]{...}`."""
    name, sign, arguments = text.partition("[ARGS]")
    if not sign:
        return _json_calls(text, tools)
    decoded = read_arguments(arguments.strip())
    return [(name.strip(), decoded)] if isinstance(decoded, dict) else []


_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
"""A value ends where the next parameter or the end of the function follows, because it may contain a closing tag."""


def _xml_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """Parse `<function=NAME><parameter=NAME>VALUE</parameter></function>`. Values are typed by the tool's schema."""
    match = _FUNCTION.fullmatch(text)
    if match is None or _PARAMETER.sub("", match[2]).strip():
        return []
    return [(match[1], typed_arguments(match[1], dict(_PARAMETER.findall(match[2])), tools))]


_READERS: Final = {"hermes": _json_calls, "llama": _json_calls, "mistral": _mistral_calls, "xml": _xml_calls}
