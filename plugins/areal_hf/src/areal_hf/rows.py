"""What is known of the live requests, as tensors with one row each, so that a token costs no Python per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from areal_hf.sampling import draw, signed_seed, uniform

if TYPE_CHECKING:
    from areal_core.servers import SamplingParameters
    from areal_vision.images import ImageInputs


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request in the generating process.

    Attributes:
        number: the client's number for it.
        input_ids: prompt tokens.
        sampling: how to draw.
        seed: of its random numbers.
        images: its images; None where it has none.
        offset: of its tokens' positions behind the prompt, beside how many stand before; see `Placed.offset`.
        row: where it lives, -1 while it waits.
        cancelled: nobody wants its answer any more.
    """

    number: int
    input_ids: list[int]
    sampling: SamplingParameters
    seed: int
    images: ImageInputs | None = None
    offset: int = 0
    row: int = -1
    cancelled: bool = False

    @property
    def limit(self) -> int:
        """Tokens that it may come to, prompt included."""
        return len(self.input_ids) + self.sampling.max_new_tokens


@dataclass(slots=True)
class Outputs:
    """What finished requests were given: one entry per request, and flat tensors of all their tokens in order.

    Attributes:
        numbers: the client's numbers.
        counts: generated tokens of each.
        stopped: whether a stop token ended it; else its length did.
        tokens, versions: [sum of counts] int32.
        logprobs: [sum of counts] float32.
        computed: tokens of each, its prompt's among them, that went through the model; empty where `experts` is.
        experts: [sum of computed, layers, choices], of these tokens; empty where they are not noted.
    """

    numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    versions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    computed: list[int] = field(default_factory=list)
    experts: torch.Tensor = field(default_factory=lambda: torch.empty(0))


_INTEGERS = ("lengths", "prompts", "last", "seeds", "minimum", "maximum", "offsets")
"""Columns of int64: tokens in the cache; tokens of the prompt; the newest token, not yet in the cache; seed; fewest
and most new tokens; see `LiveRequest.offset`."""


class Rows:
    """The state of all live requests. Row r belongs to `requests[r]`; rows are dense: compaction moves the last ones.

    All tensors have room for `capacity` rows; the live ones are the first `len(self)`.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self.device = device
        self.requests: list[LiveRequest] = []
        self.longest = 0
        self._integers = torch.zeros(len(_INTEGERS), capacity, dtype=torch.int64, device=device)
        self._temperatures = torch.ones(capacity, 1, device=device)
        self._greedy = torch.zeros(capacity, dtype=torch.bool, device=device)
        self._stops = torch.full((capacity, 1), -1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(capacity, 32, dtype=torch.int32, device=device)
        self._versions = torch.zeros(capacity, 32, dtype=torch.int32, device=device)
        self._logprobs = torch.zeros(capacity, 32, device=device)
        self._bases = torch.arange(capacity, device=device)
        self._any_greedy = False
        self._any_minimum = False
        self._most_generated = 0

    def __len__(self) -> int:
        return len(self.requests)

    def live(self, name: str) -> torch.Tensor:
        """A column of integers of the live rows, [B] int64, to read or to write in place."""
        return self._integers[_INTEGERS.index(name), : len(self.requests)]

    def join(self, joiners: list[LiveRequest]) -> None:
        """Append requests. Their prompts but for the last token must be put into the cache before the next token."""
        first, count = len(self.requests), len(joiners)
        columns = [
            [len(r.input_ids) - 1 for r in joiners],
            [len(r.input_ids) for r in joiners],
            [r.input_ids[-1] for r in joiners],
            [signed_seed(r.seed) for r in joiners],
            [r.sampling.min_new_tokens for r in joiners],
            [r.sampling.max_new_tokens for r in joiners],
            [r.offset for r in joiners],
        ]
        end = first + count
        self._integers[:, first:end] = torch.tensor(columns, dtype=torch.int64, device=self.device)
        self._temperatures[first:end, 0] = torch.tensor(
            [r.sampling.temperature for r in joiners], dtype=torch.float32, device=self.device
        )
        self._greedy[first:end] = torch.tensor([r.sampling.greedy for r in joiners], device=self.device)
        width = max(len(r.sampling.stop_token_ids) for r in joiners)
        if width > self._stops.shape[1]:
            self._stops = torch.nn.functional.pad(self._stops, (0, width - self._stops.shape[1]), value=-1)
        room = self._stops.shape[1]
        padded = [[*r.sampling.stop_token_ids, *[-1] * (room - len(r.sampling.stop_token_ids))] for r in joiners]
        self._stops[first:end] = torch.tensor(padded, dtype=torch.int64, device=self.device)
        for i, request in enumerate(joiners):
            request.row = first + i
        self.requests += joiners
        self._note_extremes()

    def sample(self, logits: torch.Tensor, version: int) -> torch.Tensor:
        """Draw the next token of every row from logits [B, V] and record it with its label.

        Returns:
            [B] bool: the rows that have ended with this token.
        """
        rows = len(self.requests)
        lengths, prompts, last, seeds, minimum, maximum, _ = self._integers[:, :rows].unbind()
        generated = lengths + 1 - prompts
        forbidden = self._forbidden(logits, generated < minimum) if self._any_minimum else None
        tokens, logprobs = draw(
            logits,
            self._temperatures[:rows],
            uniform(seeds, lengths + 1),
            greedy=self._greedy[:rows] if self._any_greedy else None,
            forbidden=forbidden,
        )
        if self._most_generated >= self._tokens.shape[1]:
            self._widen()
        index = self._bases[:rows] * self._tokens.shape[1] + generated
        self._tokens.view(-1).index_copy_(0, index, tokens.to(torch.int32))
        self._logprobs.view(-1).index_copy_(0, index, logprobs)
        self._versions.view(-1).index_fill_(0, index, version)
        last.copy_(tokens)
        lengths += 1
        self._most_generated += 1
        self.longest += 1
        stopped = (tokens.unsqueeze(1) == self._stops[:rows]).any(dim=1)
        return stopped.logical_or_(generated + 1 >= maximum)

    def _forbidden(self, logits: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        """[B, V] bool: the stop tokens of the rows that are too short to stop."""
        rows, size = logits.shape
        mask = torch.zeros(rows, size + 1, dtype=torch.bool, device=self.device)
        stops = self._stops[:rows]
        # Unused places and ids beyond the vocabulary mark the spare column, which is cut off.
        mask.scatter_(1, stops.masked_fill((stops < 0) | (stops >= size), size), True)
        return mask[:, :size] & early.unsqueeze(1)

    def _widen(self) -> None:
        room = self._tokens.shape[1]
        self._tokens = torch.nn.functional.pad(self._tokens, (0, room))
        self._versions = torch.nn.functional.pad(self._versions, (0, room))
        self._logprobs = torch.nn.functional.pad(self._logprobs, (0, room))

    def take(self, ended: list[int]) -> Outputs:
        """What the rows `ended` have generated; the rows stay until they are removed."""
        requests = [self.requests[row] for row in ended]
        rows = torch.tensor(ended, device=self.device)
        # `lengths` counts what is in the cache, with the newest token not yet in it: so it counts one less already.
        generated = self._integers[0, rows] + 1 - self._integers[1, rows]
        stopped = (self._integers[2, rows].unsqueeze(1) == self._stops[rows]).any(dim=1)
        counts = generated.tolist()
        width = max(counts, default=0)
        mask = torch.arange(width, device=self.device) < generated.unsqueeze(1)
        return Outputs(
            numbers=[r.number for r in requests],
            counts=counts,
            stopped=stopped.tolist(),
            tokens=self._tokens[rows, :width][mask].cpu(),
            versions=self._versions[rows, :width][mask].cpu(),
            logprobs=self._logprobs[rows, :width][mask].cpu(),
        )

    def remove(self, ended: list[int]) -> tuple[list[int], list[int]]:
        """Take rows out and close the gaps with the last rows.

        Returns:
            (sources, targets): the rows that moved, and where to; whatever else has rows must move the same way.
        """
        remaining = len(self.requests) - len(ended)
        leaving = set(ended)
        sources = [row for row in range(remaining, len(self.requests)) if row not in leaving]
        targets = sorted(row for row in ended if row < remaining)
        for row in ended:
            self.requests[row].row = -1
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
            self.requests[target].row = target
        del self.requests[remaining:]
        if sources:
            source_rows = torch.tensor(sources, device=self.device)
            target_rows = torch.tensor(targets, device=self.device)
            self._integers[:, target_rows] = self._integers[:, source_rows]
            settings, outputs = (self._temperatures, self._greedy, self._stops), (self._tokens, self._versions)
            for column in (*settings, *outputs, self._logprobs):
                column.index_copy_(0, target_rows, column.index_select(0, source_rows))
        self._note_extremes()
        return sources, targets

    def histories(self, start: int, stop: int) -> list[list[int]]:
        """The tokens of rows `start` to `stop` that belong in the cache: all but the newest."""
        lengths = self._integers[0, start:stop].tolist()
        found = []
        for row, length in zip(range(start, stop), lengths, strict=True):
            prompt = self.requests[row].input_ids
            if length < len(prompt):
                found.append(prompt[:length])
            else:
                found.append(prompt + self._tokens[row, : length - len(prompt)].tolist())
        return found

    def _note_extremes(self) -> None:
        """What the hot loop would otherwise ask the tensors for at every token."""
        rows = len(self.requests)
        self._any_greedy = any(r.sampling.greedy for r in self.requests)
        self._any_minimum = any(r.sampling.min_new_tokens for r in self.requests)
        if rows:
            lengths, prompts = self._integers[0, :rows], self._integers[1, :rows]
            self.longest, self._most_generated = torch.stack((lengths.max(), (lengths + 1 - prompts).max())).tolist()
        else:
            self.longest = self._most_generated = 0
