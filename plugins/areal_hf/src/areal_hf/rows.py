"""State of the live requests as tensors with one row each, so that a step needs no Python code for each request."""

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
    """A request in the server.

    Attributes:
        number: number of the request.
        input_ids: prompt tokens.
        sampling: sampling settings.
        seed: seed of the random numbers.
        images: its images; None without images.
        offset: difference between a token's position and the number of tokens before it, for tokens after the prompt;
            see `Placed.offset`.
        row: its row, or -1 while it waits.
        cancelled: True if the client has cancelled it.
        prompt_logprobs: if the sampling settings request them, the log-probabilities [T - 1] float32 of `input_ids[1:]`
            on the CPU. Empty until its prompt is computed.
    """

    number: int
    input_ids: list[int]
    sampling: SamplingParameters
    seed: int
    images: ImageInputs | None = None
    offset: int = 0
    row: int = -1
    cancelled: bool = False
    prompt_logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether the next forward over the prompt has to record `prompt_logprobs`."""
        return self.sampling.prompt_logprobs and len(self.prompt_logprobs) < len(self.input_ids) - 1

    @property
    def limit(self) -> int:
        """Largest number of tokens, prompt and output together."""
        return len(self.input_ids) + self.sampling.max_new_tokens


@dataclass(slots=True)
class Outputs:
    """Results of finished requests: one entry per request, and flat tensors of all their tokens in order.

    Attributes:
        numbers: numbers of the requests.
        counts: number of generated tokens of each request.
        stopped: True if a stop token ended the request, False if its length did.
        tokens, versions: [sum of counts] int32.
        logprobs: [sum of counts] float32.
        tops: K of each request: the number of likeliest tokens that it has for each token.
        top_ids: [sum of counts x tops] int32, the likeliest tokens.
        top_logprobs: [sum of counts x tops] float32, their log-probabilities.
        computed: number of tokens of each request for which the model was run, including the prompt. Empty if `experts`
            is.
        experts: [sum of computed, layers, choices], the routed experts of these tokens. Empty if they are not recorded.
    """

    numbers: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    tokens: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    versions: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    tops: list[int] = field(default_factory=list)
    top_ids: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int32))
    top_logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    prompt_counts: list[int] = field(default_factory=list)
    prompt_logprobs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    computed: list[int] = field(default_factory=list)
    experts: torch.Tensor = field(default_factory=lambda: torch.empty(0))


_INTEGERS = ("lengths", "prompts", "last", "seeds", "minimum", "maximum", "offsets")
"""Columns of int64: number of cached tokens; number of prompt tokens; the newest token, which is not yet cached; seed;
smallest and largest number of new tokens; see `LiveRequest.offset`."""


class Rows:
    """The state of all live requests. Row r belongs to `requests[r]`. The last rows replace those that are removed.

    All tensors have `capacity` rows. The first `len(self)` rows are live.
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
        # [capacity, tokens, K] with the largest K of a request so far; no memory without such a request.
        self._top_ids = torch.zeros(capacity, 32, 0, dtype=torch.int32, device=device)
        self._top_logprobs = torch.zeros(capacity, 32, 0, device=device)
        self._bases = torch.arange(capacity, device=device)
        self._most_tops = 0
        self._any_greedy = False
        self._any_minimum = False
        self._most_generated = 0

    def __len__(self) -> int:
        return len(self.requests)

    def live(self, name: str) -> torch.Tensor:
        """Return a column of integers of the live rows, [B] int64. It may be changed in place."""
        return self._integers[_INTEGERS.index(name), : len(self.requests)]

    def join(self, joiners: list[LiveRequest]) -> None:
        """Append requests. Their prompts except the last token must be cached before the next step."""
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
        width = self._stops.shape[1]
        padded = [[*r.sampling.stop_token_ids, *[-1] * (width - len(r.sampling.stop_token_ids))] for r in joiners]
        self._stops[first:end] = torch.tensor(padded, dtype=torch.int64, device=self.device)
        if (more := max(r.sampling.top_logprobs for r in joiners) - self._top_ids.shape[2]) > 0:
            self._top_ids = torch.nn.functional.pad(self._top_ids, (0, more))
            self._top_logprobs = torch.nn.functional.pad(self._top_logprobs, (0, more))
        for i, request in enumerate(joiners):
            request.row = first + i
        self.requests += joiners
        self._update_extremes()

    def sample(self, logits: torch.Tensor, version: int) -> torch.Tensor:
        """Draw the next token of every row from logits [B, V], and record it with the weight version.

        Returns:
            [B] bool, True for rows that end with this token.
        """
        rows = len(self.requests)
        lengths, prompts, last, seeds, minimum, maximum, _ = self._integers[:, :rows].unbind()
        generated = lengths + 1 - prompts
        forbidden = self._forbidden(logits, generated < minimum) if self._any_minimum else None
        tokens, logprobs, top_ids, top_logprobs = draw(
            logits,
            self._temperatures[:rows],
            uniform(seeds, lengths + 1),
            greedy=self._greedy[:rows] if self._any_greedy else None,
            forbidden=forbidden,
            top=self._most_tops,
        )
        if self._most_generated >= self._tokens.shape[1]:
            self._widen()
        index = self._bases[:rows] * self._tokens.shape[1] + generated
        self._tokens.view(-1).index_copy_(0, index, tokens.to(torch.int32))
        self._logprobs.view(-1).index_copy_(0, index, logprobs)
        self._versions.view(-1).index_fill_(0, index, version)
        if self._most_tops:
            self._top_ids.flatten(0, 1)[index, : self._most_tops] = top_ids.to(torch.int32)
            self._top_logprobs.flatten(0, 1)[index, : self._most_tops] = top_logprobs
        last.copy_(tokens)
        lengths += 1
        self._most_generated += 1
        self.longest += 1
        stopped = (tokens.unsqueeze(1) == self._stops[:rows]).any(dim=1)
        return stopped.logical_or_(generated + 1 >= maximum)

    def _forbidden(self, logits: torch.Tensor, early: torch.Tensor) -> torch.Tensor:
        """Return [B, V] bool, True for the stop tokens of rows that are too short to stop."""
        rows, size = logits.shape
        mask = torch.zeros(rows, size + 1, dtype=torch.bool, device=self.device)
        stops = self._stops[:rows]
        # Padding, and ids beyond the vocabulary, mark the additional column, which is cut off.
        mask.scatter_(1, stops.masked_fill((stops < 0) | (stops >= size), size), True)
        return mask[:, :size] & early.unsqueeze(1)

    def _widen(self) -> None:
        width = self._tokens.shape[1]
        self._tokens = torch.nn.functional.pad(self._tokens, (0, width))
        self._versions = torch.nn.functional.pad(self._versions, (0, width))
        self._logprobs = torch.nn.functional.pad(self._logprobs, (0, width))
        self._top_ids = torch.nn.functional.pad(self._top_ids, (0, 0, 0, width))
        self._top_logprobs = torch.nn.functional.pad(self._top_logprobs, (0, 0, 0, width))

    def take(self, ended: list[int]) -> Outputs:
        """Return the outputs of rows `ended`. The rows stay until `remove`."""
        requests = [self.requests[row] for row in ended]
        rows = torch.tensor(ended, device=self.device)
        # `lengths` does not count the newest token, which is not cached yet.
        generated = self._integers[0, rows] + 1 - self._integers[1, rows]
        stopped = (self._integers[2, rows].unsqueeze(1) == self._stops[rows]).any(dim=1)
        counts = generated.tolist()
        width = max(counts, default=0)
        mask = torch.arange(width, device=self.device) < generated.unsqueeze(1)
        tops = [r.sampling.top_logprobs for r in requests]
        outputs = Outputs(
            numbers=[r.number for r in requests],
            counts=counts,
            stopped=stopped.tolist(),
            tokens=self._tokens[rows, :width][mask].cpu(),
            versions=self._versions[rows, :width][mask].cpu(),
            logprobs=self._logprobs[rows, :width][mask].cpu(),
            tops=tops,
            prompt_counts=[len(r.prompt_logprobs) for r in requests],
            prompt_logprobs=torch.cat([r.prompt_logprobs for r in requests]),
        )
        if any(tops):
            shares = [(row, slice(count), slice(top)) for row, count, top in zip(ended, counts, tops, strict=True)]
            outputs.top_ids = torch.cat([self._top_ids[share].flatten() for share in shares]).cpu()
            outputs.top_logprobs = torch.cat([self._top_logprobs[share].flatten() for share in shares]).cpu()
        return outputs

    def remove(self, ended: list[int]) -> tuple[list[int], list[int]]:
        """Remove rows. The last rows replace them.

        Returns:
            (sources, targets): the rows that moved, and their new rows. Other tensors with rows must move the same way.
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
            for column in (*settings, *outputs, self._logprobs, self._top_ids, self._top_logprobs):
                column.index_copy_(0, target_rows, column.index_select(0, source_rows))
        self._update_extremes()
        return sources, targets

    def histories(self, start: int, stop: int) -> list[list[int]]:
        """Return the tokens of rows `start` to `stop` that are cached, that is all but the newest."""
        lengths = self._integers[0, start:stop].tolist()
        histories = []
        for row, length in zip(range(start, stop), lengths, strict=True):
            prompt = self.requests[row].input_ids
            if length < len(prompt):
                histories.append(prompt[:length])
            else:
                histories.append(prompt + self._tokens[row, : length - len(prompt)].tolist())
        return histories

    def _update_extremes(self) -> None:
        """Update numbers that the step would otherwise read from the tensors for every token."""
        rows = len(self.requests)
        self._most_tops = max((r.sampling.top_logprobs for r in self.requests), default=0)
        self._any_greedy = any(r.sampling.greedy for r in self.requests)
        self._any_minimum = any(r.sampling.min_new_tokens for r in self.requests)
        if rows:
            lengths, prompts = self._integers[0, :rows], self._integers[1, :rows]
            self.longest, self._most_generated = torch.stack((lengths.max(), (lengths + 1 - prompts).max())).tolist()
        else:
            self.longest = self._most_generated = 0
