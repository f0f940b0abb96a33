"""An inference engine that says what a script tells it to, for agents whose tools a tiny model would never call.

The answers are the script's; everything else is true: they are spelled in tokens as no tokenizer would, and their
log-probabilities are those of the run's weights, so that a trainer which sees other tokens, or the same ones behind
another prefix, computes other numbers (`train/behavior_difference`).
"""

from __future__ import annotations

import asyncio
import random
import re
from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import FinishReason, Generation
from areal_testing.conformance.naive import NaiveEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_core.engines import ModelReference
    from areal_core.servers import GenerationRequest

TURN = "<|im_start|>"
SUM = re.compile(r"(\d+)\+(\d+)=")


class ScriptedEngine(NaiveEngine):
    """Answers by rules.

    Args:
        rules: pairs of a text and an answer; the first whose text is in the last message of the prompt, or in what
            stands before the first of the user's, is said. In answers `{a}`, `{b}` and
            `{sum}` are the numbers of the sum that the prompt asks for.
    """

    def __init__(self, rules: list[list[str]]) -> None:
        super().__init__()
        self._rules = rules
        self._sampled = 0
        self._tokenizer: Any = None

    async def start(self, model: ModelReference) -> None:
        """See `InferenceEngine.start`."""
        from transformers import AutoTokenizer

        await super().start(model)
        self._tokenizer = AutoTokenizer.from_pretrained(model.path)

    async def generate(self, request: GenerationRequest) -> Generation:
        """What the script says, or what is asked for where the prompt is none of an agent's."""
        text = self._tokenizer.decode(request.input_ids, skip_special_tokens=False)
        if TURN not in text:
            return await super().generate(request)
        request.on_slot_change(True)
        await asyncio.sleep(0)
        ids = self._spell(self._scripted_answer(text), request.seed)[: request.sampling.max_new_tokens]
        is_whole = ids[-1] == self._tokenizer.eos_token_id
        self._sampled += len(ids)
        reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        return Generation(ids, self._logprobs(request.input_ids, ids), [self.version] * len(ids), reason)

    def _scripted_answer(self, text: str) -> str:
        opening = text.partition(f"{TURN}user")[0]
        last = text.rsplit(TURN, 2)[1]  # behind it only the beginning of the policy's turn follows
        said = next(answer for sign, answer in self._rules if sign in last or sign in opening)
        if numbers := SUM.findall(text):
            first, second = map(int, numbers[-1])
            for name, value in (("{a}", first), ("{b}", second), ("{sum}", first + second)):
                said = said.replace(name, str(value))
        return said

    def _spell(self, text: str, seed: int) -> list[int]:
        """Token ids of a text cut at random places, and the end."""
        draw, ids = random.Random(seed), []
        for piece in re.split(r"(</?tool_call>)", text):  # which are tokens of their own
            rest = piece
            while rest:
                size = len(rest) if rest.startswith(("<tool_call", "</tool_call")) else draw.randint(1, 5)
                ids += self._tokenizer.encode(rest[:size], add_special_tokens=False)
                rest = rest[size:]
        return [*ids, self._tokenizer.eos_token_id]

    @torch.no_grad()
    def _logprobs(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        logits = self._model(input_ids=torch.tensor([[*prompt, *ids]]), logits_to_keep=len(ids) + 1).logits[0, :-1]
        chosen = torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(ids)[:, None])
        return [float(value) for value in chosen[:, 0]]

    def pop_metrics(self) -> dict[str, float]:
        """Tokens of scripted answers since this was last asked."""
        sampled, self._sampled = self._sampled, 0
        return {"scripted/tokens": float(sampled)}
