"""Deterministic fakes of the parts of a run that a test is not about. None of them needs a model."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from areal_core.data import Episode, FinishReason, Generation, Trajectory
from areal_core.servers import Grant, InferenceCapabilities, InferenceEngine, SlotLease, SlotRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import torch

    from areal_core.data import Metric, PackedBatch
    from areal_core.engines import ModelReference, WeightUpdate
    from areal_core.sdk import Context, Dataset, RolloutWorkflow, WorkflowContext
    from areal_core.servers import GenerationRequest, InferenceClient, LeaseHolder, Slots

__all__ = ["GRANT", "CountingDataset", "FakeClient", "FakeContext", "FakeEngine", "FakeTokenizer", "FakeWorkflow"]

GRANT = Grant("fake", "", version=0, run_id="", labels_tokens=True, context=1 << 31, vocabulary=50)
"""The grant of a `FakeEngine` at weight version 0."""


class FakeEngine(InferenceEngine):
    """An inference engine that draws tokens from the request's seed. Its only weights are a version number.

    Args:
        tokens: number of tokens of each generation.
        delay_s: seconds that each generation takes; 0 answers immediately.
        places: number of slots.

    Attributes:
        version: weight version.
        requests: all requests that the engine has answered.
        waiting: holders that wait for a slot, the first one first.
    """

    capabilities = InferenceCapabilities(frozenset({"keep_cache", "recompute"}), deterministic=True)

    def __init__(self, tokens: int = 8, delay_s: float = 0.0, places: int = 1 << 31) -> None:
        self._tokens = tokens
        self._delay_s = delay_s
        self._places = places
        self.waiting: list[LeaseHolder] = []
        self._held: list[LeaseHolder] = []
        self.version = 0
        self.requests: list[GenerationRequest] = []

    async def start(self, model: ModelReference) -> None:
        """Return immediately: there is nothing to load."""

    def acquire(self, request: SlotRequest, holder: LeaseHolder) -> None:
        """See `Slots.acquire`. First come, first served."""
        self.waiting.append(holder)
        self._give_slots()

    def release(self, holder: LeaseHolder, *, has_failed: bool = False) -> None:
        """See `Slots.release`."""
        for holders in (self.waiting, self._held):
            if holder in holders:
                holders.remove(holder)
        self._give_slots()

    def _give_slots(self) -> None:
        while self.waiting and len(self._held) < self._places:
            self._held.append(self.waiting.pop(0))
            self._held[-1].give(replace(GRANT, version=self.version))

    def client(self, slots: Slots, model: ModelReference) -> FakeClient:
        """See `InferenceEngine.client`."""
        return FakeClient(self, slots)

    async def generate(self, request: GenerationRequest) -> Generation:
        """Draw tokens from the request's seed. All have the version at the start of the request."""
        return await FakeClient(self, self).generate(request)

    async def draw(self, request: GenerationRequest, version: int) -> Generation:
        """Draw the answer to a request that has a slot, with this version for all tokens."""
        self.requests.append(request)
        if self._delay_s:
            await asyncio.sleep(self._delay_s)
        count = min(self._tokens, request.sampling.max_new_tokens)
        draw = random.Random(request.seed)
        ids = [draw.randrange(4, GRANT.vocabulary) for _ in range(count)]
        return Generation(ids, [-1.0] * count, [version] * count, FinishReason.STOP)

    async def update_weights(self, update: WeightUpdate) -> None:
        """Set the version."""
        self.version = update.version


class FakeClient:
    """The `InferenceClient` of a `FakeEngine`.

    Args:
        engine: draws the tokens.
        slots: leases the slots; may be another engine.
    """

    def __init__(self, engine: FakeEngine, slots: Slots) -> None:
        self.capabilities = engine.capabilities
        self._engine, self._slots = engine, slots

    async def generate(self, request: GenerationRequest) -> Generation:
        """See `InferenceClient.generate`."""
        async with SlotLease(self._slots, SlotRequest(), request.on_slot_change) as grant:
            return await self._engine.draw(request, grant.version)

    async def close(self) -> None:
        """Do nothing: there is no connection."""


@dataclass
class FakeContext:
    """Fake services of the trainer for an algorithm. Every update is on the whole batch.

    Args:
        outputs: returns a role's outputs for a batch, with the parameters of `areal_core.sdk.Context.forward`. None if
            the algorithm requests no outputs.
        updates: number of optimizer updates.
        step: number of batches that were trained on before.
        version: weight version of the policy.
        state: tensors of the algorithm by name.

    Attributes:
        metrics: logged metrics by name.
    """

    outputs: Callable[[str, PackedBatch, Sequence[str]], dict[str, torch.Tensor]] | None = None
    updates: int = 1
    step: int = 0
    version: int = 0
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict, init=False)

    def forward(self, role: str, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `Context.forward`."""
        assert self.outputs is not None, f"FakeContext has no outputs, but {role} needs {', '.join(outputs)}"
        return self.outputs(role, batch, outputs)

    def minibatches(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """Yield the batch once for each update."""
        for _ in range(self.updates):
            yield batch

    def log(self, name: str, metric: Metric) -> None:
        """See `Context.log`."""
        self.metrics[name] = self.metrics[name] + metric if name in self.metrics else metric


class FakeTokenizer:
    """A tokenizer with one token for each character, its code point. Token 0 ends a text."""

    eos_token_id = 0
    model_max_length = 1 << 30

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the code points of the characters."""
        return [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the characters. Tokens 0 are left out if special tokens are skipped."""
        return "".join(chr(token) for token in token_ids if token or not skip_special_tokens)


class CountingDataset:
    """A data set with the rows `{"prompt": "<index>", "answer": "<index>"}`."""

    def __init__(self, rows: int = 32) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return {"prompt": str(index), "answer": str(index)}


class FakeWorkflow:
    """A workflow with one generation. The reward is the last digit of its first token id."""

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """See `RolloutWorkflow.run_episode`."""
        prompt = [ord(character) for character in row["prompt"]]
        generation = await context.generate(prompt)
        trajectory = Trajectory.from_generation(prompt, generation)
        return Episode([trajectory], float(generation.output_ids[0] % 10), text=row["prompt"])


if TYPE_CHECKING:
    # mypy compares each fake with its interface. `FakeEngine` derives from its interface. Tokenizers have none: areal
    # uses those of transformers.
    _client: InferenceClient = FakeClient(FakeEngine(), FakeEngine())
    _context: Context = FakeContext()
    _slots: Slots = FakeEngine()
    _dataset: Dataset = CountingDataset()
    _workflow: RolloutWorkflow = FakeWorkflow()
