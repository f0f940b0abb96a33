"""Continuous batching: requests join and leave between tokens.

All live sequences take one step together. Their state is a row in a few tensors, so that a step costs the same few
operations however many there are; Python looks at single requests only when they join or leave.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from areal_hf.cache import RowCache, rounded
from areal_hf.sampling import draw, uniform
from transformers import DynamicCache

from areal_core.data import FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from areal_core.interfaces import Generation, GenerationRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """A request under way; its row changes when others leave."""

    request: GenerationRequest
    cancelled: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits.

    Attributes:
        rows: sequences in one step.
        context: tokens of one sequence.
        cache_tokens: rows times their padded length, over all sequences under way.
    """

    rows: int
    context: int
    cache_tokens: int


_ROW_STATE = {
    "token": torch.int64,  # the last one sampled; its key and value are not in the cache yet
    "length": torch.int64,  # tokens in the cache
    "produced": torch.int64,
    "most": torch.int64,
    "least": torch.int64,
    "seed": torch.int64,
    "temperature": torch.float32,
    "greedy": torch.bool,
}


class Scheduler:
    """Generates for all requests that fit, step by step.

    Args:
        model: in evaluation mode, on its device.
        limits: rows, context and memory.
    """

    def __init__(self, model: PreTrainedModel, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._device = model.device
        self.version = 0
        self._waiting: deque[Sequence] = deque()
        self._rows: list[Sequence] = []
        self._cache = RowCache(model.config.get_text_config().num_hidden_layers)
        rows = limits.rows
        self._state = {name: torch.zeros(rows, dtype=dtype, device=self._device) for name, dtype in _ROW_STATE.items()}
        self._stops = torch.full((rows, 1), -1, dtype=torch.int64, device=self._device)
        self._prompts = torch.zeros(rows, 0, dtype=torch.int64, device=self._device)
        self._outputs = {
            "ids": torch.zeros(rows, 0, dtype=torch.int64, device=self._device),
            "logprobs": torch.zeros(rows, 0, dtype=torch.float32, device=self._device),
            "versions": torch.zeros(rows, 0, dtype=torch.int32, device=self._device),
        }
        self._longest = 0

    @property
    def is_idle(self) -> bool:
        """Nothing to do."""
        return not self._rows and not self._waiting

    def refusal(self, request: GenerationRequest) -> str | None:
        """Why a request can never be served, or None."""
        prompt, wanted = len(request.input_ids), request.sampling.max_new_tokens
        if not prompt:
            return "the prompt is empty; a request needs at least one token"
        if prompt + wanted > self._limits.context:
            return (
                f"a prompt of {prompt} tokens and {wanted} new ones exceed the model's context of "
                f"{self._limits.context}; lower sampling.max_new_tokens or shorten the prompt"
            )
        if rounded(prompt + wanted) > self._limits.cache_tokens:
            return (
                f"a prompt of {prompt} tokens and {wanted} new ones need more than inference_engine.cache_memory_gib "
                f"holds: {self._limits.cache_tokens} tokens"
            )
        return None

    def add(self, request: GenerationRequest) -> Sequence:
        """Take a request; it joins at the next step that has room, in order of arrival."""
        sequence = Sequence(request)
        self._waiting.append(sequence)
        return sequence

    @torch.inference_mode()
    def step(self) -> list[tuple[Sequence, Generation]]:
        """Let requests join, draw one token for each live one, and return those that ended."""
        joined = self._join()
        if joined:
            logits = self._prefill(len(self._rows) - joined, joined)
            ended = self._sample(logits, len(self._rows) - joined)
            if self._rows and not self._waiting_fits():
                return ended + self._decode()
            return ended
        return self._decode()

    @torch.inference_mode()
    def rebuild(self) -> None:
        """Compute the keys and values of live sequences anew, after weights have changed."""
        if self._rows:
            self._prefill(0, len(self._rows), logits=False)

    # Joining.

    def _waiting_fits(self) -> bool:
        while self._waiting and self._waiting[0].cancelled:
            self._waiting.popleft()
        if not self._waiting or len(self._rows) >= self._limits.rows:
            return False
        longest = max(self._needs(sequence) for sequence in [*self._rows, self._waiting[0]])
        return (len(self._rows) + 1) * rounded(longest) <= self._limits.cache_tokens

    @staticmethod
    def _needs(sequence: Sequence) -> int:
        return len(sequence.request.input_ids) + sequence.request.sampling.max_new_tokens

    def _join(self) -> int:
        """Give waiting requests rows behind the live ones; how many joined."""
        first = len(self._rows)
        while self._waiting_fits():
            self._rows.append(self._waiting.popleft())
        joined = self._rows[first:]
        if not joined:
            return 0
        rows = slice(first, len(self._rows))
        sampling = [sequence.request.sampling for sequence in joined]
        values: dict[str, list[Any]] = {
            "token": [sequence.request.input_ids[-1] for sequence in joined],
            "length": [len(sequence.request.input_ids) for sequence in joined],
            "produced": [0] * len(joined),
            "most": [s.max_new_tokens for s in sampling],
            "least": [s.min_new_tokens for s in sampling],
            "seed": [sequence.request.seed for sequence in joined],
            "temperature": [s.temperature for s in sampling],
            "greedy": [s.greedy for s in sampling],
        }
        for name, column in values.items():
            self._state[name][rows] = torch.tensor(column, dtype=_ROW_STATE[name], device=self._device)
        self._widen(joined)
        for row, sequence in enumerate(joined, first):
            ids = sequence.request.input_ids
            self._prompts[row, : len(ids)] = torch.tensor(ids, device=self._device)
            stops = sequence.request.sampling.stop_token_ids
            self._stops[row] = -1
            self._stops[row, : len(stops)] = torch.tensor(stops, dtype=torch.int64, device=self._device)
        return len(joined)

    def _widen(self, joined: list[Sequence]) -> None:
        """Make the tensors with a column for each token wide enough."""

        def widened(old: torch.Tensor, width: int, fill: int = 0) -> torch.Tensor:
            if width <= old.shape[1]:
                return old
            new = old.new_full((old.shape[0], width), fill)
            new[:, : old.shape[1]] = old
            return new

        tokens = max(sequence.request.sampling.max_new_tokens for sequence in joined)
        self._outputs = {name: widened(old, tokens) for name, old in self._outputs.items()}
        self._prompts = widened(self._prompts, max(len(sequence.request.input_ids) for sequence in joined))
        self._stops = widened(self._stops, max(len(s.request.sampling.stop_token_ids) for s in joined), -1)

    def _prefill(self, first: int, count: int, *, logits: bool = True) -> torch.Tensor:
        """Fill the cache of `count` rows with all their tokens but the one that is still to be fed.

        Returns:
            [count, V], the logits behind the last token of each (of no meaning without `logits`).
        """
        rows = slice(first, first + count)
        produced = self._state["produced"][rows]
        lengths = self._state["length"][rows]
        longest = int(lengths.max())
        padding = longest - lengths
        # Left padding puts every sequence's last token into the last column.
        columns = torch.arange(longest, device=self._device) - padding[:, None]
        prompt_lengths = lengths - produced.sub(1).clamp_(min=0)
        prompts = self._prompts[rows].gather(1, columns.clamp(0, self._prompts.shape[1] - 1))
        generated = (columns - prompt_lengths[:, None]).clamp_(0, max(0, self._outputs["ids"].shape[1] - 1))
        ids = torch.where(columns < prompt_lengths[:, None], prompts, self._outputs["ids"][rows].gather(1, generated))
        real = columns >= 0
        mask = None
        if bool(padding.any()):
            causal = torch.ones(longest, longest, dtype=torch.bool, device=self._device).tril()
            # A padded position attends to itself, so that no row of the softmax is empty.
            mask = (causal & real[:, None, :] | torch.eye(longest, dtype=torch.bool, device=self._device))[:, None]
        cache = DynamicCache()
        output = self._model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=columns.clamp(min=0),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache.write(first, cache, padding)
        self._longest = max(self._longest, longest)
        return output.logits[:, -1]

    # Decoding.

    def _decode(self) -> list[tuple[Sequence, Generation]]:
        live = len(self._rows)
        if not live:
            return []
        lengths = self._state["length"][:live]
        self._cache.live = live
        mask = self._cache.begin_step(lengths, self._longest)
        output = self._model(
            input_ids=self._state["token"][:live, None],
            attention_mask=mask,
            position_ids=lengths[:, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        lengths += 1
        self._longest += 1
        return self._sample(output.logits[:, -1], 0)

    def _sample(self, logits: torch.Tensor, first: int) -> list[tuple[Sequence, Generation]]:
        """Draw a token for the rows from `first` on; remove those that end with it."""
        rows = slice(first, len(self._rows))
        state = {name: value[rows] for name, value in self._state.items()}
        produced = state["produced"]
        numbers = uniform(state["seed"], produced)
        stops = self._stops[rows]
        early = produced < state["least"]
        forbidden = None
        if bool(early.any()):
            forbidden = torch.zeros_like(logits, dtype=torch.bool)
            forbidden.scatter_(1, stops.clamp(min=0), (stops >= 0) & early[:, None])
        tokens, logprobs = draw(logits, state["temperature"][:, None], numbers, state["greedy"], forbidden)
        at = produced[:, None]
        self._outputs["ids"][rows].scatter_(1, at, tokens[:, None])
        self._outputs["logprobs"][rows].scatter_(1, at, logprobs[:, None])
        self._outputs["versions"][rows].scatter_(1, at, self.version)
        produced += 1
        state["token"].copy_(tokens)
        stopped = (tokens[:, None] == stops).any(1)
        over = stopped | (produced >= state["most"])
        ended = over.nonzero().flatten().tolist() if bool(over.any()) else []
        cancelled = [row for row, sequence in enumerate(self._rows) if sequence.cancelled]
        if not ended and not cancelled:
            return []
        reasons = stopped.tolist()
        finished = [self._generation(first + index, stopped=reasons[index]) for index in ended]
        self._remove({*(first + index for index in ended), *cancelled})
        return [(sequence, generation) for sequence, generation in finished if not sequence.cancelled]

    def _generation(self, row: int, *, stopped: bool) -> tuple[Sequence, Generation]:
        from areal_core.interfaces import Generation

        count = int(self._state["produced"][row])
        output = {name: values[row, :count].tolist() for name, values in self._outputs.items()}
        reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        return self._rows[row], Generation(output["ids"], output["logprobs"], output["versions"], reason)

    def _remove(self, ended: set[int]) -> None:
        """Close the gaps with rows from the end."""
        live = len(self._rows) - len(ended)
        targets = [row for row in sorted(ended) if row < live]
        sources = [row for row in range(live, len(self._rows)) if row not in ended]
        for target, source in zip(targets, sources, strict=True):
            self._rows[target] = self._rows[source]
        del self._rows[live:]
        if targets:
            to = torch.tensor(targets, device=self._device)
            source_rows = torch.tensor(sources, device=self._device)
            self._cache.move(source_rows, to)
            for values in (*self._state.values(), *self._outputs.values(), self._prompts, self._stops):
                values[to] = values[source_rows]
        self._longest = int(self._state["length"][:live].max()) if live else 0
