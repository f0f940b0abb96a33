"""Tokenizers with three chat templates, and a policy whose every token is known. Imported by path; see conftest."""

from __future__ import annotations

import asyncio
import copy
import functools
import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import FinishReason, Generation

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Tokens of their own that are not special, as in Qwen's vocabularies."""

TOOLS = """{% if tools %}<|im_start|>system
Tools: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}Call one with <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}"""
CALLS = """{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}"""
TEMPLATES = {
    # Thoughts stay where they were.
    "chat": TOOLS
    + """{% for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<result>{{ message.content }}</result>{% else %}{{ message.content }}{% endif %}"""
    + CALLS
    + """<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # Those before the last word of the user are taken out.
    "thinking": TOOLS
    + """{% set ns = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}
{%- set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for message in messages %}<|im_start|>
{{- 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'assistant' and message.reasoning_content and loop.index0 > ns.last %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}"""
    + CALLS
    + """<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}""",
    # Headers, and turns that end with a token and no line.
    "headers": """{% if tools %}<|head|>system<|/head|>

<tool_call> with {{ tools | tojson }}<|eot|>{% endif %}{% for message in messages %}<|head|>{{ message.role }}<|/head|>

{{ message.content | trim }}"""
    + CALLS
    + """<|eot|>{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>

{% endif %}""",
}
ENDS = {"chat": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot|>"}


def make_tokenizer(template: str) -> Any:
    """Return a tokenizer that the test may change: it is a copy, so no other test sees the change."""
    return copy.copy(_train_tokenizer(template))


@functools.cache
def _train_tokenizer(template: str) -> Any:
    """Return a tokenizer of bytes with a few merges, so that one text has many spellings."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    model = Tokenizer(BPE(unk_token=None))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    words = ["the quick answer is that arguments and names are told in a word, 'false' or \"true\""] * 40
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(
        words, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token=ENDS[template], chat_template=TEMPLATES[template],
        additional_special_tokens=[token for token in SPECIAL if token != ENDS[template]],
    )  # fmt: skip
    fast.add_tokens(MARKS)
    return fast


@functools.cache
def make_forward() -> Callable[[Sequence[int]], torch.Tensor]:
    """[T] log-probabilities of each token under a small true model, given those before it; 0 for the first."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 2}
    config = Qwen3Config(vocab_size=384, num_hidden_layers=2, num_key_value_heads=1, **sizes)
    model = Qwen3ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data *= 2.0

    @torch.no_grad()
    def forward(ids: Sequence[int]) -> torch.Tensor:
        tokens = torch.tensor([list(ids)])
        logprobs = model(tokens).logits[0, :-1].log_softmax(-1)
        return torch.cat([torch.zeros(1), logprobs.gather(1, tokens[0, 1:, None])[:, 0]])

    return forward


class Policy:
    """Says what it is told to, in a spelling that no tokenizer would choose; remembers every token.

    Args:
        template: of the tokenizer.
        log: the text of the next answer, from how many were given.
        seed: of the spelling.
        forward: gives the log-probabilities; None where nobody looks at them.
    """

    def __init__(
        self, template: str, log: Callable[[int], str], seed: int = 0, forward: Callable[..., Any] | None = None
    ) -> None:
        self.tokenizer = make_tokenizer(template)
        self.said: list[tuple[list[int], Generation]] = []
        self.wait_s = 0.0
        self.pause: asyncio.Event | None = None
        self.scored: list[dict[str, Any]] = []
        self._end = self.tokenizer.convert_tokens_to_ids(ENDS[template])
        self._log = log
        self._random = random.Random(seed)
        self._forward = forward

    def spell(self, text: str) -> list[int]:
        """Token ids of a text, cut at random places before it is tokenized."""
        ids: list[int] = []
        while text:
            mark = next((mark for mark in MARKS if text.startswith(mark)), "")
            size = len(mark) or self._random.randint(1, 5)
            cut = min([size, *(place for mark in MARKS if (place := text.find(mark)) > 0)]) if not mark else size
            ids += self.tokenizer.encode(text[:cut], add_special_tokens=False)
            text = text[cut:]
        return ids

    async def generate(
        self,
        input_ids: list[int],
        *,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        on_tokens: Callable[[Sequence[int]], None] | None = None,
    ) -> Generation:
        text = self._log(len(self.said))
        for ending in stop:
            head, sign, _ = text.partition(ending)
            text = head + sign
        ids = self.spell(text) + [self._end] * (not any(text.endswith(ending) for ending in stop))
        reason = FinishReason.STOP
        if max_new_tokens is not None and len(ids) > max_new_tokens:
            ids, reason = ids[:max_new_tokens], FinishReason.LENGTH
        logprobs = [-1.0] * len(ids)
        if self._forward is not None:
            logprobs = self._forward([*input_ids, *ids])[len(input_ids) :].tolist()
        generation = Generation(ids, logprobs, [7] * len(ids), reason)
        place = len(self.said)
        self.said.append((list(input_ids), generation))
        if on_tokens is not None and not stop:
            await self._show(ids, on_tokens)
        if self.wait_s:
            try:
                await asyncio.sleep(self.wait_s)
            except asyncio.CancelledError:
                self.said[place] = ([], generation)
                raise
        return generation

    async def _show(self, ids: list[int], on_tokens: Callable[[Sequence[int]], None]) -> None:
        """Pass the tokens on a few at a time. Wait in the middle until the test goes on."""
        sent = 0
        while sent < len(ids):
            size = self._random.randint(1, 4)
            on_tokens(ids[sent : sent + size])
            sent += size
            if self.pause is not None and sent >= len(ids) // 2:
                await self.pause.wait()
            await asyncio.sleep(0)

    async def score(self, **arguments: Any) -> Any:
        self.scored.append(arguments)
        return SimpleNamespace(value=1.0, components={"given": 1.0})

    @property
    def context(self) -> Any:
        """As a workflow has it."""
        return SimpleNamespace(
            tokenizer=self.tokenizer,
            generate=self.generate,
            score=self.score,
            end_ids=frozenset({self._end}),
            is_evaluation=False,
            sample_index=0,
        )
