"""Parts of `asynchronous.py`: answers whose lengths are drawn beforehand, and an adapter that updates in another way.

Whatever weights do, an answer has the length that its row says, so that every row of the table generates the same.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from areal_core.data import Episode, Trajectory
from areal_sglang.adapter import SGLangAdapter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.sdk import WorkflowContext

SIGMA = math.log(10) / 2.3263478740408408
"""Of a lognormal whose 99th percentile is ten times its median."""
CUT = 20
"""No length is more than so many medians; that cuts one in eight hundred."""


def draw_lengths(median: int, count: int, seed: str) -> list[int]:
    """So many lengths, each at least 1."""
    draw = random.Random(seed)
    return [max(1, min(CUT * median, round(median * math.exp(draw.gauss(0.0, SIGMA))))) for _ in range(count)]


class LongTail:
    """Prompts of random tokens, each with a length for every answer.

    Args:
        median: of the lengths, in tokens.
        answers: to each prompt.
        prompt: tokens of a prompt.
        vocabulary: of the model.
        rows: prompts.
        seed: of tokens and lengths.
    """

    def __init__(
        self, median: int, answers: int, prompt: int, vocabulary: int, rows: int = 1 << 16, seed: int = 0
    ) -> None:
        self._median = median
        self._answers = answers
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._rows = rows
        self._seed = seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        draw = random.Random(f"{self._seed}/prompt/{index}")
        lengths = draw_lengths(self._median, self._answers, f"{self._seed}/lengths/{index}")
        return {"input_ids": [draw.randrange(4, self._vocabulary) for _ in range(self._prompt)], "lengths": lengths}


class ForcedLength:
    """One answer of exactly the length that the row says; its reward is the share of even tokens.

    The model's tokenizer must have no end token, for nothing else keeps a server from ending an answer early.
    """

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        prompt, length = row["input_ids"], row["lengths"][context.sample_index]
        generation = await context.generate(prompt, max_new_tokens=length)
        if len(generation.output_ids) != length:
            raise ValueError(f"{len(generation.output_ids)} tokens were generated instead of {length}")
        reward = sum(token % 2 == 0 for token in generation.output_ids) / length
        return Episode([Trajectory.from_generation(prompt, generation)], reward)


class DrainingAdapter(SGLangAdapter):
    """Has a weight update wait for the requests under way, where it would end them and go on with them afterwards.

    The fleet holds new requests back during an update, and asks again and again to abort those that are left.
    """

    async def identify(self, connection):
        """As the adapter's own; a server that labels tokens itself would be updated with requests in it."""
        return replace(await super().identify(connection), reports_spans=False)

    async def abort(self, connection):
        """Leave them alone."""
