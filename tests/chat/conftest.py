"""Tokenizers of two kinds, and chat templates that behave as those of public models do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

if TYPE_CHECKING:
    from collections.abc import Callable

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|user|>", "<|assistant|>", "<|observation|>", "<s>", "</s>")

CHATML = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>{{ 'assistant\n' }}"
    "{%- if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
OPENS_A_THOUGHT = (
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}{%- if m.role == 'assistant' %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As R1's distilled models: it opens the thought and drops thoughts from past turns."""
EMPTY_THOUGHT = (
    "{%- for m in messages %}<|im_start|>{{ m.role + '\n' }}"
    "{%- if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""As Qwen3: the last answer has an empty thought, which is dropped once another message follows."""
WITHOUT_AN_END = (
    "{%- set names = {'user': '<|user|>', 'assistant': '<|assistant|>', 'tool': '<|observation|>'} %}"
    "{%- for m in messages %}{{ names[m.role] }}\n{{ m.content }}"
    "{%- if m.tool_calls %}<tool_call>{{ m.tool_calls[0].function.name }}</tool_call>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|assistant|>\n{% endif %}{% if tools %}{% endif %}"
)
"""As GLM: a turn ends where the next one begins."""
SYSTEM_LAST = (
    "{{ '<s>' }}{%- for m in messages if m.role != 'system' %}{%- if m.role == 'user' %}[INST] "
    "{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
    "{{ m.content }} [/INST]"
    "{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
"""As Mistral: the system message stands in the last turn of the user, and only while that is the last message."""
PLAIN = (
    "{%- for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}"
    "{%- if add_generation_prompt %}### assistant:\n{% endif %}"
)


def byte_level() -> Tokenizer:
    """One token a byte, as GPT-2's alphabet spells them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    """As SentencePiece: a space is "▁", and one is put in front of a text."""
    letters = ["<unk>", "▁", "▁4", "=4", *(chr(code) for code in range(33, 127)), "\n"]
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "4"), ("=", "4")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """Make a tokenizer from a template, a kind (bytes, always, first, never) and an end token."""

    def make(template: str | None = CHATML, kind: str = "bytes", eos: str = "<|im_end|>") -> Any:
        inner = byte_level() if kind == "bytes" else metaspace(kind)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=inner, eos_token=eos, additional_special_tokens=[*SPECIAL], chat_template=template
        )
        return tokenizer

    return make
