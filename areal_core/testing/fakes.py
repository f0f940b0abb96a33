"""Deterministic stand-ins for the parts of a run that a test is not about. None of them needs a model."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

from areal_core.data.trajectory import Episode, FinishReason, Generation, Trajectory
from areal_core.interfaces.inference import InferenceCapabilities

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from areal_core.interfaces.inference import GenerationRequest, WeightUpdate
    from areal_core.interfaces.model import ModelReference
    from areal_core.interfaces.workflow import WorkflowContext


class FakeEngine:
    """An inference engine that draws tokens from the request's seed; its only weights are a version number.

    Args:
        tokens: in each generation.
        delay_s: of each generation; 0 answers at once.
        places: requests that are worked on at once.
    """

    capabilities = InferenceCapabilities(frozenset({"keep_cache", "recompute"}), deterministic=True)

    def __init__(self, tokens: int = 8, delay_s: float = 0.0, places: int = 1 << 31) -> None:
        self._tokens = tokens
        self._delay_s = delay_s
        self._places = asyncio.Semaphore(places)
        self.version = 0
        self.requests: list[GenerationRequest] = []

    async def start(self, model: ModelReference) -> None:
        """Ready at once."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """Tokens from the seed, all of the version at the start of the request."""
        self.requests.append(request)
        request.on_slot(False)
        async with self._places:
            request.on_slot(True)
            version = self.version
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
        count = min(self._tokens, request.sampling.max_new_tokens)
        draw = random.Random(request.seed)
        ids = [draw.randrange(4, 50) for _ in range(count)]
        return Generation(ids, [-1.0] * count, [version] * count, FinishReason.STOP)

    async def generate_everywhere(self, request: GenerationRequest) -> list[Generation]:
        """There is one copy."""
        return [await self.generate(request)]

    async def update_weights(self, update: WeightUpdate) -> None:
        """Take over the version."""
        self.version = update.version

    def describe(self) -> str:
        """Nothing to tell."""
        return ""

    def take_metrics(self) -> dict[str, float]:
        """Nothing was measured."""
        return {}

    async def close(self) -> None:
        """Nothing to free."""


class FakeTokenizer:
    """One token for each character, its code point; 0 ends a text."""

    eos_token_id = 0
    model_max_length = 1 << 30

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Code points."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The characters, without those that end a text."""
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


class CountingDataset:
    """Rows `{"prompt": "<index>", "answer": "<index>"}`."""

    def __init__(self, rows: int = 32) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"prompt": str(index), "answer": str(index)}


class FakeWorkflow:
    """One generation, rewarded with the last digit of its first token; no tokenizer, no scorer."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        prompt = [ord(character) for character in row["prompt"]]
        generation = await context.generate(prompt)
        trajectory = Trajectory.from_generation(prompt, generation)
        return Episode([trajectory], float(generation.output_ids[0] % 10), text=row["prompt"])
