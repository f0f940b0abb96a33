"""From conversations and finished texts to the tokens that a model learns: fine-tuning, preferences, distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.chat.answers import end_mark, ends_with_a_token, left_out_messages, left_out_problem, template_opening
from areal_core.chat.messages import check_text
from areal_core.chat.template import (
    PROBE,
    encode_pieces,
    guard,
    leading_special_token,
    render_conversation,
    special_tokens,
    spelled_out,
    with_begin,
)
from areal_core.interfaces.workflow import RowError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.chat.messages import Message
    from areal_core.chat.template import Conversation

Pieces = list[tuple[list[int], bool]]
"""Token ids in order; for each piece whether it is learned."""


def learned_text(tokenizer: Any, prompt: str, answer: str, *, has_special_tokens: bool = False) -> Pieces:
    """Return a prompt as text, which is not learned, and its answer with the end token, which is.

    Args:
        tokenizer: of the model.
        prompt: may be empty.
        answer: the tokenizer's end token follows it, unless the answer has one.
        has_special_tokens: the text was rendered with a chat template before; `<|im_end|>` is a special token.

    Raises:
        RowError: the tokenizer has no end token, or a text cannot be encoded.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Pieces, learned_text
        >>> letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
        >>> pieces: Pieces = learned_text(tokenizer, "2+2=", "4")
        >>> pieces  # 128 is </s>
        [([50, 43, 50, 61], False), ([52, 128], True)]
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise RowError("the tokenizer has no end-of-sequence token, which an answer as text must end with")
    for name, text in (("prompt", prompt), ("answer", answer)):
        check_text(text, f"the {name}")
    if has_special_tokens:  # templates write a line break after the end, which is not learned
        marks = tuple(mark for mark in (getattr(tokenizer, "eos_token", None), end_mark(tokenizer)) if mark)
        is_ended = bool(marks) and answer.rstrip("\n").endswith(marks)
        answer = answer.rstrip("\n") if is_ended else answer
    else:
        is_ended, prompt, answer = False, guard(tokenizer, prompt), guard(tokenizer, answer)
    prompt_ids, answer_ids = encode_pieces(tokenizer, [prompt, answer])
    if not is_ended:
        answer_ids = [*answer_ids, end]
    whole = with_begin(tokenizer, [*prompt_ids, *answer_ids])
    context = len(whole) - len(answer_ids)
    return [(whole[:context], False), (whole[context:], True)]


def spelled_special_token(tokenizer: Any, text: str) -> str:
    """Return the first special token that a text spells, as text that was written with a chat template does."""
    places = [(text.find(spelling), spelling) for spelling in special_tokens(tokenizer) if spelling in text]
    return min(places)[1] if places else ""


def undecided_text(tokenizer: Any, row: Mapping[str, Any], keys: Sequence[str], setting: str) -> str:
    """Return why text of a row must be explained before a run: it spells a special token. Empty if none does.

    Args:
        tokenizer: of the model.
        row: of the data set.
        keys: of the row, whose values may be text.
        setting: name of the setting that the message asks for.

    Example:
        >>> from tokenizers import Tokenizer, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import undecided_text
        >>> letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="</s>")
        >>> setting = "workflow.text_has_special_tokens"
        >>> print(undecided_text(tokenizer, {"prompt": "<s>2+2=</s>"}, ["prompt"], setting))
        'prompt' spells '</s>', a special token of this model: set workflow.text_has_special_tokens to true
        if the text was written with a chat template, or to false to take it as ordinary text
        >>> undecided_text(tokenizer, {"prompt": "2+2="}, ["prompt"], setting)
        ''
    """
    for key in keys:
        if isinstance(text := row.get(key), str) and (spelling := spelled_special_token(tokenizer, text)):
            return (
                f"'{key}' spells {spelling!r}, a special token of this model: set {setting} to true if the text was "
                "written with a chat template, or to false to take it as ordinary text"
            )
    return ""


def learned_turns(
    tokenizer: Any, conversation: Conversation, *, first: int = 0, end_token: str | None = None
) -> list[Pieces]:
    """Return the sequences in which a model learns the assistant's turns of a conversation.

    A turn is what the policy would write after the template opened its turn, with the template's end. Usually all turns
    are in one sequence. A template that writes earlier turns differently once others follow (reasoning models drop old
    thoughts) makes a further sequence for each turn that it affects, so that every turn is learned after exactly the
    tokens that it will follow.

    A turn with `weight: 0`, `train: false` or `loss: false` is context, as files of other libraries have it.

    Args:
        tokenizer: of the model.
        conversation: messages and template arguments.
        first: number of the first message that may be learned.
        end_token: follows each learned turn if the template writes no end.

    Raises:
        RowError: no turn is learned, the template writes no end, or it drops a thought that is to be learned.

    Example:
        >>> from tokenizers import Tokenizer, decoders, models
        >>> from transformers import PreTrainedTokenizerFast
        >>> from areal_core.chat import Conversation, learned_turns
        >>> letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
        >>> letters.decoder = decoders.Fuse()
        >>> tokenizer = PreTrainedTokenizerFast(
        ...     tokenizer_object=letters,
        ...     eos_token="<end>",
        ...     chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}"
        ...     "{% if add_generation_prompt %}assistant: {% endif %}",
        ... )
        >>> turns = [("user", "2+2?"), ("assistant", "4"), ("user", "3+3?"), ("assistant", "6")]
        >>> conversation = Conversation([{"role": role, "content": content} for role, content in turns])
        >>> for token_ids, is_learned in learned_turns(tokenizer, conversation)[0]:
        ...     print(is_learned, repr(tokenizer.decode(token_ids)))
        False 'user: 2+2?<end>assistant: '
        True '4<end>'
        False 'user: 3+3?<end>assistant: '
        True '6<end>'
    """
    unknown = getattr(tokenizer, "unk_token_id", None)
    if end_token is not None and tokenizer.convert_tokens_to_ids(end_token) in (None, unknown):
        raise RowError(f"algorithm.example_tokenizer.end_token: {end_token!r} is no token of this model")
    sequences: list[list[tuple[str, bool]]] = []
    written = ""
    mark = end_mark(tokenizer, conversation)
    for number, message in enumerate(conversation.messages):
        if message["role"] != "assistant" or number < first or not _is_learned(message, number):
            continue
        context = conversation.with_messages(conversation.messages[:number])
        before = render_conversation(tokenizer, context, add_generation_prompt=True)
        turn = _turn(tokenizer, conversation, number, before, mark)
        if not ends_with_a_token(tokenizer, turn) and end_token is None:
            raise RowError(
                "the chat template writes no end token after an answer, so the model would not learn to stop: write "
                "one there in the template, or set algorithm.example_tokenizer.end_token to the token that ends answers"
            )
        if sequences and before.startswith(written):
            sequences[-1].append((before[len(written) :], False))
        else:
            sequences.append([(before, False)])
        sequences[-1].append((turn, True))
        written = before + turn
    if not sequences:
        raise RowError("there is nothing to learn in it: no turn of the assistant")
    asked = ((n, context.messages[n]["role"]) for n in left_out_messages(tokenizer, context, before))
    # Templates drop old turns of the assistant on purpose.
    if problem := left_out_problem([f"message {n} ({role})" for n, role in asked if role != "assistant"]):
        raise RowError(problem)
    return [_encoded(tokenizer, sequence, end_token) for sequence in sequences]


def _turn(tokenizer: Any, conversation: Conversation, number: int, before: str, mark: str) -> str:
    """Return what the policy writes in a turn, its end included, as text with stand-ins.

    Usually it is what the template adds to `before`, the conversation with the policy's turn opened. Some templates
    write a past turn differently from one that they open; then it is the content as it is.
    """
    message = conversation.messages[number]
    content, thought = message.get("content"), message.get("reasoning_content")
    past = conversation.with_messages(conversation.messages[:number])
    turn = _added(tokenizer, conversation.with_messages(conversation.messages[: number + 1]), before, mark)
    opened = template_opening(tokenizer, past, before).strip()
    if turn is None and not opened and not ends_with_a_closed_thought(before):
        # Such as Mistral's, which shows a system message only while the user's turn is the last one.
        alone = conversation.with_messages([{"role": "user", "content": "question"}])
        question = render_conversation(tokenizer, alone, add_generation_prompt=True)
        turn = _added(tokenizer, alone.with_messages([*alone.messages, message]), question, mark)
    plain = spelled_out(tokenizer, turn) if turn is not None else ""
    text = content if isinstance(content, str) else ""
    own_thought = text.rpartition("</think>")[0]
    if ends_with_a_closed_thought(before) and (thought or own_thought):
        raise RowError(
            f"message {number} has a thought, and the chat template opens the assistant's turn with an empty one: "
            "switch thoughts on in chat_template_kwargs, such as {enable_thinking: true}, or leave the thought out"
        )
    if thought and thought.strip() not in plain:
        raise RowError(
            f"the chat template does not write reasoning_content, which message {number} has: write the thought into "
            "the content, in the form in which the model writes it"
        )
    calls = [str(call["function"]["name"]) for call in message.get("tool_calls") or ()]
    left_out = [part for part in (text.rpartition("</think>")[2].strip(), *calls) if part not in plain]
    if turn is not None and left_out and not own_thought:
        raise RowError(
            f"the chat template does not write all of message {number}: {left_out[0]!r:.60} is missing, so the model "
            "would not learn it. Take another template, or write it into the content"
        )
    is_quoted = own_thought and not opened and not text.lstrip().startswith("<think>")
    if is_quoted and text.strip() not in plain:
        raise RowError(
            f"message {number} has '</think>' in its content, and the chat template takes what precedes it for a "
            "thought: begin the thought with '<think>', or spell the tag in another way"
        )
    opens_twice = bool(opened and own_thought and opened in plain)
    if turn is not None and own_thought.removeprefix("<think>").strip() in plain and not opens_twice:
        return (
            turn if ends_with_a_token(tokenizer, turn) else turn + _next_opening(tokenizer, conversation, number, mark)
        )
    if ends_with_a_closed_thought(before) and isinstance(content, str) and not message.get("tool_calls"):
        return guard(tokenizer, content) + mark
    if not isinstance(content, str) or message.get("tool_calls") or not own_thought:
        raise RowError(
            f"the chat template opens the assistant's turn with {opened!r}, and message {number} does not continue it: "
            "write the thought into the content, such as '<think>...</think>answer', or switch thoughts off in "
            "chat_template_kwargs, such as {enable_thinking: false}"
            if opened
            else f"the chat template writes message {number} differently from a turn that it opens for the policy, so "
            "it is unclear which tokens are the assistant's"
        )
    # The template drops the thought from a past turn, or has opened it: the policy writes the content as it is.
    continuation = content.removeprefix(opened).lstrip("\n") if opened and content.startswith(opened) else content
    return guard(tokenizer, continuation) + mark


def ends_with_a_closed_thought(text: str) -> bool:
    """Return whether a prompt ends with an empty thought, by which templates switch thinking off."""
    return text.rstrip().endswith("</think>")


def _added(tokenizer: Any, conversation: Conversation, before: str, mark: str) -> str | None:
    """Return what the last turn of a conversation adds to `before`, up to its end; None if it does not continue it."""
    whole = render_conversation(tokenizer, conversation, add_generation_prompt=False)
    if not whole.startswith(before):
        return None
    turn = whole[len(before) :]
    content = conversation.messages[-1].get("content")
    content_text = guard(tokenizer, content).strip() if isinstance(content, str) else ""
    start = max(turn.rfind(content_text), 0) + len(content_text)
    place = turn.find(mark, start) if mark else -1
    if place >= 0:
        return turn[: place + len(mark)]
    return turn.rstrip("\n")


def _next_opening(tokenizer: Any, conversation: Conversation, number: int, mark: str) -> str:
    """Return the special token that opens the turn after one whose end the template does not write (GLM); or nothing.

    Such a model ends its turn with that token: one opens a user's turn, another the result of a tool.
    """
    message = conversation.messages[number]
    role = "tool" if message.get("tool_calls") else "user"
    following = [*conversation.messages[number + 1 : number + 2], {"role": role, "content": PROBE}][:1]
    messages = conversation.messages[: number + 1]
    whole, longer = (
        render_conversation(tokenizer, conversation.with_messages(part), add_generation_prompt=False).rstrip("\n")
        for part in (messages, [*messages, *following])
    )
    return leading_special_token(tokenizer, longer[len(whole) :]) if longer.startswith(whole) else mark


def _is_learned(message: Message, number: int) -> bool:
    for key in ("weight", "train", "loss"):  # OpenAI's, axolotl's, ms-swift's
        if message.get(key, 1) not in (0, 1):
            raise RowError(f"message {number} has {key} {message[key]!r}; it must be 0 or 1, false or true")
        if not message.get(key, 1):
            return False
    return True


def _encoded(tokenizer: Any, sequence: list[tuple[str, bool]], end_token: str | None) -> Pieces:
    ids = encode_pieces(tokenizer, [text for text, _ in sequence])
    pieces: Pieces = []
    for part, (text, is_learned) in zip(ids, sequence, strict=True):
        lacks_end = is_learned and end_token is not None and not ends_with_a_token(tokenizer, text)
        end = [tokenizer.convert_tokens_to_ids(end_token)] if lacks_end else []
        pieces.append(([*part, *end], is_learned))
    return pieces
