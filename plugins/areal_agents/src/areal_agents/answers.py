"""From sampled tokens to a message: reasoning, text and tool calls, in the model family's own form."""

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

_LONGEST_OPENING: Final = 16
"""Tokens that spell an opened thought."""
ANCHOR: Final = "\x02answer\x02"
"""Begins what is parsed: the text that the chat template has already written for the policy, and the answer."""
REASONING: Final = {"open": "<think>", "close": "</think>", "content": "text", "repeats": True, "join": "\n"}
CONTENT: Final = {"content": "text", "repeats": True, "join": "\n"}


def _form(**calls: Any) -> dict[str, Any]:
    """A response template of transformers: regions of a text. Calls are kept as written, to tell malformed ones."""
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
"""How model families write calls of tools."""
SIGNS: Final = {"<function=": "xml", "<tool_call>": "hermes", "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama"}
"""What a chat template that teaches such a form has in it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the policy said.

    Attributes:
        message: as an agent receives it; calls have identifiers, and their arguments are objects.
        malformed: calls that cannot be read; they stay in the text.
    """

    message: Message
    malformed: int = 0

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Of tools."""
        return list(self.message.get("tool_calls", ()))


class AnswerReader:
    """Reads answers of one model.

    Args:
        tokenizer: of the model. Where it brings a response template of its own, that is used.
        form: one of `FORMS`; "auto" looks for signs in the chat template.
        chat_template: in place of the tokenizer's own.

    Attributes:
        tokenizer: with the chat template of the conversations.
    """

    def __init__(self, tokenizer: Any, form: str = "auto", chat_template: str | None = None) -> None:
        if chat_template is not None:
            tokenizer = copy.copy(tokenizer)
            tokenizer.chat_template = chat_template
        self.tokenizer = tokenizer
        self._own = getattr(tokenizer, "response_template", None) if form == "auto" else None
        written = str(getattr(tokenizer, "chat_template", "") or "")
        found = next((name for sign, name in SIGNS.items() if sign in written), "none")
        self.form = found if form == "auto" else form
        self._ends = {*getattr(tokenizer, "all_special_ids", ())}
        self._texts = TokenTexts(tokenizer)

    def begun(self, prompt_ids: Sequence[int]) -> str:
        """What the chat template has written at the beginning of the policy's turn, and an answer continues."""
        opened = self.tokenizer.decode(prompt_ids[-_LONGEST_OPENING:], skip_special_tokens=False).rstrip()
        return "<think>" if opened.endswith("<think>") else ""

    def logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """Return those of the sampled tokens, as OpenAI's chat completions write them."""
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
        """A generation as a message.

        Args:
            generation: what was sampled.
            begun: see `begun`.
            tools: that the agent has; where there are none, what looks like a call is text.
            stop: texts at which the answer ends, without them.
            first_call: number of its first call among those of the episode, for their identifiers.
        """
        ids = generation.output_ids
        while ids and ids[-1] in self._ends:
            ids = ids[:-1]
        text = self.tokenizer.decode(ids, skip_special_tokens=False)
        if places := [place for ending in stop if (place := text.find(ending)) >= 0]:
            text = text[: min(places)]
        if self._own is not None:
            parser = ResponseParser(self._own, prefix="")
        else:
            parser = ResponseParser(FORMS[self.form if tools else "none"], prefix=ANCHOR + begun)
        try:
            events = parser.feed(text)
            found, last_events = parser.finalize()
            written = [_own_call(call, tools) for call in found.get("tool_calls", ())]
        except Exception:  # noqa: BLE001 - a tokenizer's own template may raise anything at what does not follow it
            return Answer({"role": "assistant", "content": text}, 1)
        if self._own is None:
            regions = [(e["field"], e["value"]) for e in [*events, *last_events] if e["type"] == "region_close"]
        else:
            regions = [("content", found.get("content") or "")]
        return self._message(regions, found.get("reasoning_content") or "", written, tools, first_call)

    def _message(
        self,
        regions: Sequence[tuple[str, str]],
        thought: str,
        written: list[Call],
        tools: Sequence[Any],
        first_call: int,
    ) -> Answer:
        """Return a message of an answer's regions; calls that cannot be read stay in the text, where they stood."""
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
        if self.form == "llama" and not written and (read := _json_calls(content, tools)):
            content, written = "", read  # these models leave the tag out where the function is a user's
        for number, (name, arguments) in enumerate(written, first_call):
            function = {"name": name, "arguments": arguments}
            # Nine letters and digits, which is what Mistral's templates insist on.
            calls.append({"id": f"call{number:05d}", "type": "function", "function": function})
        message: Message = {"role": "assistant", "content": content}
        if thought:
            message["reasoning_content"] = thought
        if calls:
            message["tool_calls"] = calls
        return Answer(message, malformed)


Call = tuple[str, Any]


def _own_call(call: Any, tools: Sequence[Any]) -> Call:
    function = read_json(json.dumps(call))  # what can be written can be given to the template again
    function = function.get("function", function)
    name, arguments = function["name"], read_arguments(function.get("arguments"))
    return name, typed_arguments(name, arguments, tools) if isinstance(arguments, dict) else arguments


def _json_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """`{"name": ..., "arguments": {...}}`, one or a list of them."""
    del tools
    try:
        found = read_json(text)
    except ValueError:
        return []
    calls = []
    for call in found if isinstance(found, list) else [found]:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return []
        arguments = read_arguments(call.get("arguments", call.get("parameters")))
        if not isinstance(arguments, dict):
            return []
        calls.append((call["name"], arguments))
    return calls


def _mistral_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """A list in JSON, or `name[ARGS]{...}`."""
    name, sign, arguments = text.partition("[ARGS]")
    if not sign:
        return _json_calls(text, tools)
    found = read_arguments(arguments.strip())
    return [(name.strip(), found)] if isinstance(found, dict) else []


_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)
"""A value ends where another parameter or the end of the function follows: it may hold a closing tag itself."""


def _xml_calls(text: str, tools: Sequence[Any]) -> list[Call]:
    """Read `<function=NAME><parameter=NAME>VALUE</parameter></function>`; values have the types of the tool."""
    found = _FUNCTION.fullmatch(text)
    if found is None or _PARAMETER.sub("", found[2]).strip():
        return []
    return [(found[1], typed_arguments(found[1], dict(_PARAMETER.findall(found[2])), tools))]


_READERS: Final = {"hermes": _json_calls, "llama": _json_calls, "mistral": _mistral_calls, "xml": _xml_calls}
