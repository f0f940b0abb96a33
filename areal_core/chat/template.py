"""Chat templates: conversations as text, and text as tokens. Nothing else calls `apply_chat_template`.

Special tokens belong to the template. Where the content of a message spells one, the spelling is encoded as ordinary
text: a *stand-in*, a character for private use, takes its place while the template renders and the text is encoded.

A text is encoded as a whole and then cut, because tokenizers treat the beginning of a text in their own way:
SentencePiece puts a space in front of it. What precedes a cut always has the tokens that it has alone, as a prompt does
when a policy is asked.
"""

from __future__ import annotations

import copy
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Final

from areal_core.interfaces.workflow import RowError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.chat.messages import Message

PROBE: Final = "probe"
"""The content of a message that is rendered to see what the template writes around it."""
RUNS_OWN: Final = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that are not the template's."""
_ANCHORS: Final = ("\n", "a", ".", " ")
"""Prefixes for encoding a continuation: the first one that does not merge with the text is used and cut off."""
_STAND_INS: Final = 0x100000
"""First of the last 65,534 characters for private use. Icon fonts use those below."""
_STAND_IN: Final = re.compile("([\U00100000-\U0010fffd])")
_ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class RewrittenPrefixError(ValueError):
    """The template writes earlier turns differently once others follow, so tokens cannot be appended to them.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import RewrittenPrefixError, between_turns
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=Tokenizer(models.BPE({chr(code): code for code in range(128)}, [])),
        ...     chat_template="{{ messages | length }} messages: {{ messages | map(attribute='content') | join }}",
        ... )
        >>> question, answer = {"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}
        >>> try:
        ...     between_turns(tokenizer, [question], answer, [{"role": "user", "content": "3+3?"}], output_ids=[52])
        ... except RewrittenPrefixError:
        ...     print("start a new trajectory")
        start a new trajectory
    """


@dataclass(frozen=True)
class Conversation:
    """Everything that a chat template is given.

    Attributes:
        messages: in the form that `read_conversation` returns.
        tools: function tools; see `read_tools`.
        arguments: further arguments of the template, such as `enable_thinking` and `documents`.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Conversation, Message, encode, render_conversation
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=Tokenizer(models.BPE({chr(code): code for code in range(128)}, [])),
        ...     chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"
        ...     "{% if add_generation_prompt %}assistant:{% endif %}",
        ... )
        >>> question: Message = {"role": "user", "content": "2+2?"}
        >>> text = render_conversation(tokenizer, Conversation([question]), add_generation_prompt=True)
        >>> text
        'user: 2+2? assistant:'
        >>> input_ids, text = encode(tokenizer, text)
        >>> len(input_ids)
        21
    """

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def with_messages(self, messages: Sequence[Message]) -> Conversation:
        """Return a copy with these messages; tools and arguments stay."""
        return Conversation(messages, self.tools, self.arguments)

    @property
    def template_arguments(self) -> dict[str, Any]:
        """The template's arguments beside the messages."""
        return {**({"tools": list(self.tools)} if self.tools else {}), **self.arguments}


def render(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **arguments: Any
) -> str:
    """Return a conversation as the tokenizer's template writes it, with stand-ins; `encode` turns it into tokens.

    Args:
        tokenizer: of the model, with a chat template.
        messages: in the form of `chat.messages`.
        add_generation_prompt: open the policy's turn at the end.
        arguments: further arguments of the template, such as `tools`.

    Raises:
        RowError: the tokenizer has no chat template, the template refuses the conversation, or it shows no tools.
    """
    written = template_text(tokenizer, has_tools=bool(arguments.get("tools")))
    _check_is_shown(written, messages, arguments)
    try:
        text: str = tokenizer.apply_chat_template(
            guard(tokenizer, [_in_words_of(written, message) for message in messages]),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{name: guard(tokenizer, value) for name, value in arguments.items()},
        )
    except Exception as error:
        if not written and "chat_template" in str(error):
            raise RowError(
                "the model's tokenizer has no chat template: save one in its folder (chat_template.jinja), or give "
                "the prompt as text"
            ) from None
        raise RowError(f"the chat template does not take this conversation: {type(error).__name__}: {error}") from error
    return text


def render_conversation(tokenizer: Any, conversation: Conversation, *, add_generation_prompt: bool) -> str:
    """Return a conversation as the template writes it; see `render`.

    Raises:
        RowError: as `render`; or the template does not read one of the conversation's arguments.
    """
    written = template_text(tokenizer, has_tools=bool(conversation.tools))
    for name in conversation.arguments if written else ():
        if not re.search(rf"\b{re.escape(name)}\b", written):
            raise RowError(f"the chat template does not read '{name}': correct the name, or leave it out")
    return render(
        tokenizer,
        conversation.messages,
        add_generation_prompt=add_generation_prompt,
        **conversation.template_arguments,
    )


def apply_template(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **arguments: Any) -> tuple[list[int], str]:
    """Return token ids and text of a conversation that waits for the policy's turn; arguments are those of `render`."""
    return encode(tokenizer, render(tokenizer, messages, add_generation_prompt=True, **arguments))


def template_text(tokenizer: Any, *, has_tools: bool = False) -> str:
    """Return the source of the tokenizer's chat template; empty without one.

    Of several templates it is the one that transformers takes: `tool_use` for conversations with tools, or `default`.
    """
    written = getattr(tokenizer, "chat_template", None)
    if isinstance(written, dict):
        written = written.get("tool_use" if has_tools and "tool_use" in written else "default")
    return str(written or "")


def between_turns(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any],
    following: Sequence[Mapping[str, Any]],
    output_ids: Sequence[int],
    **arguments: Any,
) -> tuple[list[int], str]:
    """Return what the template writes between the policy's turn and its next one: token ids and text.

    It is the difference of two renderings. The end of the turn is the policy's own if it sampled one. If the turn was
    cut, the template's end is added as context, which is not learned.

    Args:
        tokenizer: of the model.
        messages: before the policy's turn.
        answer: the turn as a message.
        following: the messages after it.
        output_ids: the turn as it was sampled.
        arguments: of the template; see `render`.

    Raises:
        RewrittenPrefixError: the template writes earlier turns differently once others follow.
    """
    before = render(tokenizer, [*messages, answer], add_generation_prompt=False, **arguments).rstrip("\n")
    after = render(tokenizer, [*messages, answer, *following], add_generation_prompt=True, **arguments)
    if not after.startswith(before):
        raise RewrittenPrefixError(
            "the chat template rewrites earlier turns, so tokens cannot be appended; use a workflow that starts a new "
            "trajectory for each turn"
        )
    end = end_of_turn(tokenizer, messages, **arguments)
    end_ids = encode(tokenizer, end)[0]
    has_ended = bool(end_ids) and list(output_ids[len(output_ids) - len(end_ids) :]) == end_ids
    in_end = (spelling for spelling in special_tokens(tokenizer) if spelling in end)
    last = next((one for one in in_end if _plain_ids(tokenizer, one) == list(output_ids[-1:])), None)
    if not has_ended and last is not None:
        # The policy wrote a part of the template's end: its `</s>` without the space that the template puts in front.
        place = end.index(last) + len(last)
        has_ended, end, rest = True, end[:place], end[place:]
    else:
        rest = "" if has_ended else end
    added = rest + after[len(before) :]
    if not end and (opening := leading_special_token(tokenizer, added)):
        # The template writes no end: models of this kind end their turn by opening the next one.
        end, end_ids = opening, encode(tokenizer, opening)[0]
        has_ended = list(output_ids[-1:]) == end_ids
        added = added.removeprefix(opening) if has_ended else added
    # Something must stand in front, because a tokenizer may put a space at the beginning of a text.
    _, ids = encode_pieces(tokenizer, [end if has_ended else "a", added])
    return ids, spelled_out(tokenizer, added)


def end_of_turn(tokenizer: Any, messages: Sequence[Mapping[str, Any]] = (), **arguments: Any) -> str:
    """Return what the template writes after the content of an assistant's turn, without line breaks at its end.

    It is empty if the template writes nothing.
    """
    probing = [*messages, {"role": "assistant", "content": PROBE}]
    if not messages:
        probing.insert(0, {"role": "user", "content": "question"})
    text = render(tokenizer, probing, add_generation_prompt=False, **arguments)
    return text.rpartition(PROBE)[2].rstrip("\n") if PROBE in text else ""


def leading_special_token(tokenizer: Any, text: str) -> str:
    """Return the special token with which a text begins, white space left out; empty if it begins with none."""
    return next((spelling for spelling in special_tokens(tokenizer) if text.lstrip().startswith(spelling)), "")


def guard(tokenizer: Any, content: Any) -> Any:
    """Return content in which stand-ins take the place of what spells a special token, at any depth.

    Content that spells none is unchanged, and so are its tokens.
    """
    if isinstance(content, str):
        for number, spelling in enumerate(special_tokens(tokenizer)):
            content = content.replace(spelling, chr(_STAND_INS + number))
        return content
    if isinstance(content, dict):
        return {guard(tokenizer, key): guard(tokenizer, value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [guard(tokenizer, value) for value in content]
    return content


def encode(tokenizer: Any, text: str) -> tuple[list[int], str]:
    """Return the token ids of a text with stand-ins, and the text with what they stand for.

    A stand-in becomes the ordinary tokens of what it spells.
    """
    return encode_pieces(tokenizer, [text])[0], spelled_out(tokenizer, text)


def encode_pieces(tokenizer: Any, pieces: Sequence[str]) -> list[list[int]]:
    """Encode pieces of one text. Return the token ids of each piece.

    Together they are the tokens of the whole text, unless the tokenizer would join the end of one piece and the
    beginning of the next in one token. Then both keep tokens of their own, because a policy is asked a prompt before
    its answer exists.

    Args:
        tokenizer: of the model.
        pieces: parts of a text with stand-ins, in order.
    """
    text = "".join(pieces)
    if len(pieces) == 1 and not _STAND_IN.search(text):
        return [_plain_ids(tokenizer, text)]
    ends = list(accumulate(map(len, pieces)))
    ids_of_pieces: list[list[int]] = [[] for _ in pieces]
    starts = [0, *(match.start() for match in _borders(tokenizer).finditer(text))]
    starts += [start + 1 for start in starts if _STAND_IN.match(text, start)]  # the text after a stand-in
    starts = sorted({start for start in starts if start < len(text)})
    for start, end in pairwise([*starts, len(text)]):
        cuts = [start, *(cut for cut in ends if start < cut < end), end]
        done: list[int] = []
        for begin, stop in pairwise(cuts):
            ids = _ids_of_part(tokenizer, text, start, stop)
            fits = ids[: len(done)] == done
            added = ids[len(done) :] if fits else _continued(tokenizer, text[begin:stop])
            done += added
            ids_of_pieces[bisect_right(ends, begin)] += added
    return ids_of_pieces


def spelled_out(tokenizer: Any, text: str) -> str:
    """Return a text with what its stand-ins stand for."""
    spellings = special_tokens(tokenizer)
    return _STAND_IN.sub(lambda match: _spelling(match[0], spellings), text)


def with_begin(tokenizer: Any, ids: Sequence[int]) -> list[int]:
    """Return the tokens of a plain text after what the tokenizer puts in front of one, such as BOS.

    Use it for a text that no chat template has rendered: a template writes this token itself.

    Example:
        >>> from tokenizers import Tokenizer, models, processors
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import with_begin
        >>> letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
        >>> letters.add_special_tokens(["<s>"])
        1
        >>> letters.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 128)])
        >>> with_begin(PreTrainedTokenizerFast(tokenizer_object=letters), [50, 43, 50])
        [128, 50, 43, 50]
    """
    begin = _begin(tokenizer)
    return list(ids) if tuple(ids[: len(begin)]) == begin else [*begin, *ids]


@lru_cache(maxsize=8)
def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Return how the special tokens are spelled, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    spelled = {*getattr(tokenizer, "all_special_tokens", ()), *(token.content for token in added if token.special)}
    return tuple(sorted(spelled - {""}, key=lambda text: (-len(text), text)))


def _in_words_of(template: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with the names that the template reads for a thought and for the developer's role."""
    named = dict(message)
    if "reasoning_content" in named and "reasoning_content" not in template:
        read = (name for name in ("thinking", "reasoning") if re.search(rf"[.'\"]{name}\b", template))
        known = next(read, None)
        if known is not None:
            named[known] = named.pop("reasoning_content")
    if named.get("role") == "developer" and "developer" not in template:
        named["role"] = "system"
    return named


def _check_is_shown(template: str, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> None:
    """Refuse tools, calls and roles that a template would leave out, or write without meaning, in silence.

    Raises:
        RowError: the template's source does not mention them, or the role of a message.
    """
    for number, message in enumerate(messages if template else ()):
        role = str(message.get("role"))
        if role not in _ROLES and not re.search(rf"['\"]{re.escape(role)}['\"]", template):
            raise RowError(
                f"message {number} has the role {role!r}, which the chat template does not know: use "
                "system, user, assistant or tool"
            )
    if template and arguments.get("tools") and "tools" not in template:
        raise RowError("the chat template shows no tools: take a model whose template does, or leave them out")
    if template and "tool_calls" not in template and any(message.get("tool_calls") for message in messages):
        raise RowError("the chat template does not write calls of tools (tool_calls): write them into the content")


@lru_cache(maxsize=8)
def _borders(tokenizer: Any) -> re.Pattern[str]:
    """Return a pattern of special tokens and stand-ins: no token reaches over one."""
    spellings = "|".join(map(re.escape, special_tokens(tokenizer)))
    return re.compile(f"{spellings}|{_STAND_IN.pattern}" if spellings else _STAND_IN.pattern)


def _ids_of_part(tokenizer: Any, text: str, start: int, stop: int) -> list[int]:
    """Return the tokens of a part of a text that begins at a special token, at or after a stand-in, or at its start."""
    part = text[start:stop]
    spellings = special_tokens(tokenizer)
    if _STAND_IN.fullmatch(part) and (spelling := _spelling(part, spellings)) != part:
        return list(_ordinary_tokens(tokenizer)[spelling])
    follows_stand_in = start > 0 and _STAND_IN.match(text, start - 1) is not None
    return _continued(tokenizer, part) if follows_stand_in else _plain_ids(tokenizer, part)


def _plain_ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False)) if text else []


def _continued(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Return the tokens of a text that continues another one, without a space that a tokenizer puts in front."""
    for anchor in _ANCHORS if text else ():
        before, whole = (
            tokenizer.encode(part, add_special_tokens=False, **options) for part in (anchor, anchor + text)
        )
        if whole[: len(before)] == before:
            return list(whole[len(before) :])
    return list(tokenizer.encode(text, add_special_tokens=False, **options)) if text else []


def _spelling(stand_in: str, spellings: Sequence[str]) -> str:
    """Return what a stand-in stands for; a character of the text's own that only looks like one stays."""
    number = ord(stand_in) - _STAND_INS
    return spellings[number] if number < len(spellings) else stand_in


@lru_cache(maxsize=8)
def _ordinary_tokens(tokenizer: Any) -> dict[str, list[int]]:
    """Return the ordinary tokens of what spells a special one, by its spelling.

    They come from a copy: `split_special_tokens` is set on the tokenizer, and other threads encode with that. A
    vocabulary may hold a special token as a piece too; then the spelling is encoded letter by letter.
    """
    copied = copy.deepcopy(tokenizer)
    spellings = special_tokens(tokenizer)
    special_ids = {*getattr(tokenizer, "all_special_ids", ()), *getattr(tokenizer, "added_tokens_decoder", {})}
    ordinary = {spelling: _continued(copied, spelling, split_special_tokens=True) for spelling in spellings}
    for spelling, ids in ordinary.items():
        if not special_ids.isdisjoint(ids):
            letters = [_continued(copied, letter, split_special_tokens=True) for letter in spelling]
            ordinary[spelling] = [token for letter in letters for token in letter]
    return ordinary


@lru_cache(maxsize=8)
def _begin(tokenizer: Any) -> tuple[int, ...]:
    plain, whole = (tokenizer.encode("a", add_special_tokens=adds) for adds in (False, True))
    ahead = range(len(whole) - len(plain) + 1)
    return tuple(whole[: next((n for n in ahead if whole[n : n + len(plain)] == plain), 0)])
