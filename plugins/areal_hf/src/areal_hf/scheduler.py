"""Continuous batching: requests join and leave between tokens.

All live requests take one step together. Their state is rows of a few tensors, so that a step costs the same few
operations however many there are; Python looks at a single request only when it joins or leaves. A joining request's
prompt, but for its last token, is put into the cache; the last token is then an ordinary step's input. Rebuilding the
cache under new weights is the same operation on live rows, with what they have generated behind their prompts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from areal_core.plugins import extra_module
from areal_core.servers.images import sees_images
from areal_hf.attention import NAME as GROUPED
from areal_hf.cache import RowCache, rounded
from areal_hf.experts import RoutedExperts
from areal_hf.masks import AttentionMasks
from areal_hf.rows import LiveRequest, Outputs, Rows
from areal_hf.weights import WeightLoader

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from areal_vision.images import ImageInputs
    from areal_vision.places import VisionTokens

    _Prompt = tuple[tuple[int, ...], int]

_PATIENCE = 4
"""Steps that a request waits for company when others run: a prompt's forward costs nearly the same for one as for
eight, and is taken from everybody's time."""

_COMPANY = 8
"""A waiting party of max_requests / 8 is large enough to join at once."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What runs at once.

    Attributes:
        requests: rows of a step.
        sequence_length: tokens of one request, prompt and output.
        cache_bytes: of keys and values in all.
        prefill_tokens: prompt tokens of one forward, padding included.
    """

    requests: int
    sequence_length: int
    cache_bytes: int
    prefill_tokens: int


class Scheduler:
    """Generates for all requests that fit, one token each at a step; the others wait in order of arrival.

    Args:
        model: in evaluation mode, on its device, with frozen parameters.
        limits: what runs at once.
        recompute: rebuild the cache of live requests when weights change.
        routed_experts: note which experts tokens go through.

    Raises:
        ValueError: the model has layers that this engine cannot run.
        RunError: its experts are to be noted, and it is no MoE whose routers are known.
    """

    def __init__(
        self, model: PreTrainedModel, limits: Limits, *, recompute: bool, routed_experts: bool = False
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        if getattr(model, "_is_stateful", False):
            raise ValueError(f"a model of type {config.model_type} keeps a state that cannot be cut into rows")
        self.version = 0
        self._model = model
        self._limits = limits
        self._recompute = recompute
        self._loader = WeightLoader(model)
        self._vision: VisionTokens | None = None
        if sees_images(model.config):
            self._vision = extra_module("areal_vision.places", "hf", "vision").VisionTokens(model)
        self._masks = AttentionMasks(config, model.dtype, explicit=config._attn_implementation != GROUPED)
        self._cache = RowCache(config.num_hidden_layers)
        self._rows = Rows(limits.requests, model.device)
        self._waiting: deque[LiveRequest] = deque()
        self._waited = 0
        self._cancelled = 0
        self.experts: RoutedExperts | None = None
        self._bytes_per_token = self._probe()
        if routed_experts:
            self.experts = RoutedExperts(model, limits.requests)

    @torch.inference_mode()
    def _probe(self) -> int:
        """Bytes of the cache for one token, asked of the model itself: every family has its own shapes."""
        self._cache.fit(1, 1, 0, 0, 1)
        self._prefill(0, [[0]], [None])
        size = self._cache.bytes_per_token
        self._cache.reset()
        return size

    @property
    def cache_tokens(self) -> int:
        """Tokens of one request that the cache's memory could hold at most."""
        return self._limits.cache_bytes // self._bytes_per_token

    @property
    def idle(self) -> bool:
        """Whether there is nothing to generate."""
        return not self._waiting and not len(self._rows)

    def add(self, request: LiveRequest) -> None:
        """Take a request. Its tokens and `limit` must be within the vocabulary and the context.

        Raises:
            ValueError: the cache has no room for it, its images do not fit its tokens, or the model sees none.
        """
        if request.limit > self.cache_tokens:
            raise ValueError(f"wants {request.limit} tokens, but cache_gib has room for {self.cache_tokens} tokens")
        if request.images is not None:
            if self._vision is None:
                raise ValueError("the request has images, and the model sees none")
            if request.input_ids[-1] == self._vision.image:
                raise ValueError("the prompt ends with an image, and must end with text")
            request.offset = self._vision.place(torch.tensor(request.input_ids), request.images.grid).offset
        self._waiting.append(request)

    def cancel(self, request: LiveRequest) -> None:
        """Forget a request; its row is free before the next token."""
        request.cancelled = True
        self._cancelled += 1

    @torch.inference_mode()
    def step(self) -> Outputs | None:
        """One token for every live request.

        Returns:
            What the requests that ended with this token were given, or None where none did.
        """
        if self._cancelled:
            self._forget_cancelled()
        self._admit()
        rows = self._rows
        if not len(rows):
            return None
        self._fit(len(rows), rows.longest + 1)
        lengths = rows.live("lengths")
        width = self._cache.attended_width(rows.longest)
        self._cache.append(lengths, width)
        last, positions = rows.live("last"), lengths
        if self._vision is not None:
            last, positions = self._vision.feed(last), lengths + rows.live("offsets")
        logits = self._model(
            input_ids=last.unsqueeze(1),
            attention_mask=self._masks.for_tokens(lengths, width),
            position_ids=positions.unsqueeze(1),
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        if self.experts is not None:
            self.experts.append(lengths, rows.longest)
        ended = rows.sample(logits, self.version).nonzero().flatten().tolist()
        if not ended:
            return None
        outputs = rows.take(ended)
        if self.experts is not None:
            self._report_experts(outputs, ended)
        self._remove(ended)
        return outputs

    def _report_experts(self, outputs: Outputs, ended: list[int]) -> None:
        """Of all tokens that rows `ended` had computed: all but their newest."""
        assert self.experts is not None
        rows = torch.tensor(ended, device=self._rows.device)
        counts = self._rows.live("lengths")[rows]
        outputs.computed, outputs.experts = counts.tolist(), self.experts.take(rows, counts)

    @torch.inference_mode()
    def update_weights(self, version: int, folder: Path) -> None:
        """Take over weights between two tokens.

        Raises:
            RunError: they do not fit; everything goes on with the old ones.
        """
        self._loader.load(folder)
        self.version = version
        if self._recompute and len(self._rows):
            self._fill(0, len(self._rows), is_again=True)

    def _forget_cancelled(self) -> None:
        self._cancelled = 0
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        if ended := [row for row, request in enumerate(self._rows.requests) if request.cancelled]:
            self._remove(ended)

    def _remove(self, ended: list[int]) -> None:
        sources, targets = self._rows.remove(ended)
        if sources:
            device = self._rows.device
            origins, places = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
            # The newest token's keys are in the cache already, so `longest` columns hold something.
            self._cache.move(origins, places, self._rows.longest)
            if self.experts is not None:
                self.experts.move(origins, places)
        if not len(self._rows):
            # Memory back; and what is generated next does not depend on what ran before, not even in its strides.
            self._cache.reset()
            if self.experts is not None:
                self.experts.reset()

    def _admit(self) -> None:
        """Let waiting requests join, in order, as many as there are rows and memory for."""
        rows, limits = self._rows, self._limits
        free = limits.requests - len(rows)
        party = min(free, len(self._waiting))
        if not party:
            return
        self._waited += 1
        if len(rows) and party * _COMPANY < limits.requests and self._waited < _PATIENCE:
            return
        self._waited = 0
        longest = max((request.limit for request in rows.requests), default=0)
        joiners: list[LiveRequest] = []
        while self._waiting and len(joiners) < free:
            longest = max(longest, self._waiting[0].limit)
            count = len(rows) + len(joiners) + 1
            if count > 1 and count * rounded(longest) * self._bytes_per_token > limits.cache_bytes:
                break
            joiners.append(self._waiting.popleft())
        if not joiners:
            return
        start, columns = len(rows), rows.longest
        rows.join(joiners)
        self._fit(len(rows), rows.longest + 1, (start, columns))
        self._fill(start, len(rows))

    def _fit(self, count: int, columns: int, live: tuple[int, int] | None = None) -> None:
        """Make room; `live` are the rows and columns that hold something, where that is not all of them."""
        most = self._limits.cache_bytes // max(1, rounded(columns) * self._bytes_per_token)
        live_rows, live_columns = live or (count, self._rows.longest)
        self._cache.fit(count, columns, live_rows, live_columns, min(self._limits.requests, most))

    def _fill(self, start: int, stop: int, *, is_again: bool = False) -> None:
        """Put everything but the newest token of rows `start` to `stop` into the cache, in forwards of limited size;
        `is_again`, under new weights."""
        histories = self._rows.histories(start, stop)
        images = [request.images for request in self._rows.requests[start:stop]]
        chunk: list[list[int]] = []
        distinct: set[_Prompt] = set()
        longest = taken = 0
        for history, seen in zip(histories, images, strict=True):
            longest = max(longest, len(history))
            grown = distinct | {_prompt(history, seen)}
            if chunk and len(grown) * longest > self._limits.prefill_tokens:
                self._prefill(start + taken, chunk, images[taken:], is_again=is_again)
                taken += len(chunk)
                chunk, grown, longest = [], {_prompt(history, seen)}, len(history)
            chunk.append(history)
            distinct = grown
        self._prefill(start + taken, chunk, images[taken:], is_again=is_again)

    def _prefill(
        self, start: int, histories: list[list[int]], images: list[ImageInputs | None], *, is_again: bool = False
    ) -> None:
        """One forward over the distinct ones of `histories`; siblings that share a prompt share its computation.

        Args:
            start: the first of their rows.
            histories: of one row after another.
            images: of these rows, and perhaps of more.
            is_again: they were in the cache before, under other weights.
        """
        order: dict[_Prompt, int] = {}
        first: list[int] = []
        source = []
        for place, history in enumerate(histories):
            key = _prompt(history, images[place])
            if key not in order:
                order[key] = len(order)
                first.append(place)
            source.append(order[key])
        longest = max(len(history) for history in histories)
        if not longest:
            return
        device = self._rows.device
        padded = [[*histories[place], *[0] * (longest - len(histories[place]))] for place in first]
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        positions = torch.arange(longest, device=device).expand(len(order), longest)
        shown: dict[str, torch.Tensor] = {}
        if self._vision is not None:
            seen = [images[place] for place in first]
            ids, positions = self._vision.place_rows(ids, seen)
            shown = self._vision.shown(seen)
        sources = torch.tensor(source, dtype=torch.int64, device=device)
        self._cache.fill(start, sources)
        self._model(
            input_ids=ids,
            attention_mask=self._masks.for_prompts(len(order), longest, device),
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
            **shown,
        )
        if self.experts is not None and is_again:
            self.experts.take_made()
        elif self.experts is not None:
            self.experts.fill(start, sources, longest)


def _prompt(history: list[int], images: ImageInputs | None) -> _Prompt:
    """What tells prompts apart; a request's images are read once for all its siblings."""
    return tuple(history), id(images)
