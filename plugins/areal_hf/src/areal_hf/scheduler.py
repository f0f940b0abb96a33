"""Continuous batching: requests join and leave between tokens.

All live requests take one step together. Their state is rows of a few tensors, so that a step has the same few
operations for any number of requests. Python code for a single request runs only when it joins or leaves. A `Decoder`
runs the model, in the way that `choose_way` has found to be exact.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING

import torch

from areal_core.errors import RunError
from areal_hf.cache import rounded
from areal_hf.experts import RoutedExperts
from areal_hf.row_decoder import RowDecoder
from areal_hf.rows import LiveRequest, Outputs, Rows
from areal_hf.ways import Way, choose_way, decoder_of, vision_of
from areal_hf.weights import WeightLoader

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from areal_hf.limits import Limits

log = logging.getLogger(__name__)

_SLOWER = {
    Way.COHORTS: "requests of one length are computed together with transformers' own cache",
    Way.WHOLE: "each token needs a forward over the whole sequence, which is slow",
}
_PATIENCE = 4
"""Steps that requests wait for others to join with if some run: a prefill stops all live requests, and costs nearly the
same for one prompt as for eight."""

_COMPANY = 8
"""A group of waiting requests of at least 1/8 of `Limits.requests` joins immediately."""


class Scheduler:
    """Generates one token per step for all requests that fit. Others wait in order of arrival.

    Args:
        model: model in evaluation mode, on its device, with frozen parameters.
        limits: limits of concurrent work.
        recompute: rebuild the cache of live requests when weights change.
        routed_experts: record the routed experts of all tokens.

    Raises:
        RunError: the engine cannot generate exactly with the model. Or routed experts are requested, but the model is
            not an MoE with known routers, or does not generate in rows.
    """

    def __init__(
        self, model: PreTrainedModel, limits: Limits, *, recompute: bool, routed_experts: bool = False
    ) -> None:
        self.version = 0
        self._vision = vision_of(model)
        self.choice = choose_way(model, limits.sequence_length)
        self._limits = limits
        self._recompute = recompute
        kind = model.config.model_type
        if self.choice.way is Way.REFUSED:
            raise RunError(
                f"the embedded engine does not generate what transformers computes for model type '{kind}': "
                f"{self.choice.reason}",
                hints=["set inference_engine to sglang or vllm"],
            )
        if self.choice.way is not Way.ROWS:
            log.warning("model type '%s': %s, because %s", kind, _SLOWER[self.choice.way], self.choice.reason)
        self._vocabulary = model.config.get_text_config(decoder=True).vocab_size
        self._loader = WeightLoader(model)
        self._decoder = decoder_of(self.choice, model, limits, self._vision)
        self._rows = Rows(limits.requests, model.device)
        self._waiting: deque[LiveRequest] = deque()
        self._waited = 0
        self._cancelled = 0
        self.experts: RoutedExperts | None = None
        if routed_experts:
            if not isinstance(self._decoder, RowDecoder):
                raise RunError(
                    f"routed_experts is set, but model type '{kind}' does not generate in rows: {self.choice.reason}",
                    hints=["set inference_engine.routed_experts to false"],
                )
            self.experts = self._decoder.experts = RoutedExperts(model, limits.requests)

    @property
    def cache_tokens(self) -> int:
        """Largest number of tokens of one request that fits into the cache's memory."""
        free = self._limits.cache_bytes - self._decoder.bytes_per_row
        return free // self._decoder.bytes_per_token if self._decoder.bytes_per_token else 1 << 40

    @property
    def idle(self) -> bool:
        """Whether there is no request."""
        return not self._waiting and not len(self._rows)

    def add(self, request: LiveRequest) -> None:
        """Queue a request. Its tokens must be in the vocabulary, and its `limit` within the context.

        Raises:
            ValueError: it does not fit into the cache, its images do not fit its tokens, the model takes no images, or
                it wants more likeliest tokens than the model has.
        """
        words = self._vocabulary
        if request.sampling.top_logprobs > words:
            raise ValueError(
                f"wants the {request.sampling.top_logprobs} likeliest tokens of a model with {words} tokens"
            )
        if request.limit > self.cache_tokens:
            raise ValueError(f"needs {request.limit} tokens, but cache_gib has room for {self.cache_tokens} tokens")
        if request.images is not None:
            if self._vision is None:
                raise ValueError("the request has images, but the model takes none or areal-vision is not installed")
            if request.input_ids[-1] == self._vision.image:
                raise ValueError("the prompt ends with an image: it must end with text")
            request.offset = self._vision.place(torch.tensor(request.input_ids), request.images.grid).offset
        self._waiting.append(request)

    def cancel(self, request: LiveRequest) -> None:
        """Cancel a request. Its row is free in the next step."""
        request.cancelled = True
        self._cancelled += 1

    @torch.inference_mode()
    def step(self) -> Outputs | None:
        """Generate one token for every live request.

        Returns:
            The outputs of requests that ended with this token, or None if no request ended.
        """
        if self._cancelled:
            self._forget_cancelled()
        self._admit()
        rows = self._rows
        if not len(rows):
            return None
        logits = self._decoder.logits(rows)
        ended = rows.sample(logits, self.version).nonzero().flatten().tolist()
        if not ended:
            return None
        outputs = rows.take(ended)
        if self.experts is not None:
            self._report_experts(outputs, ended)
        self._remove(ended)
        return outputs

    def _report_experts(self, outputs: Outputs, ended: list[int]) -> None:
        """Add the routed experts of all computed tokens of rows `ended`, that is all but the newest."""
        assert self.experts is not None
        rows = torch.tensor(ended, device=self._rows.device)
        counts = self._rows.live("lengths")[rows]
        outputs.computed, outputs.experts = counts.tolist(), self.experts.take(rows, counts)

    @torch.inference_mode()
    def update_weights(self, version: int, folder: Path) -> None:
        """Load weights between two tokens.

        Raises:
            RunError: they do not fit the model, which keeps the old weights.
        """
        self._loader.load(folder)
        self.version = version
        if self._recompute and len(self._rows):
            self._decoder.rebuild(self._rows)

    def _forget_cancelled(self) -> None:
        self._cancelled = 0
        self._waiting = deque(request for request in self._waiting if not request.cancelled)
        if ended := [row for row, request in enumerate(self._rows.requests) if request.cancelled]:
            self._remove(ended)

    def _remove(self, ended: list[int]) -> None:
        sources, targets = self._rows.remove(ended)
        self._decoder.remove(self._rows, ended, sources, targets)
        if self.experts is not None and sources:
            device = self._rows.device
            self.experts.move(torch.tensor(sources, device=device), torch.tensor(targets, device=device))
        if self.experts is not None and not len(self._rows):
            self.experts.reset()

    def _admit(self) -> None:
        """Let waiting requests join in order, as many as fit into rows and memory."""
        rows, limits = self._rows, self._limits
        free = limits.requests - len(rows)
        joining = min(free, len(self._waiting))
        if not joining:
            return
        self._waited += 1
        if len(rows) and joining * _COMPANY < limits.requests and self._waited < _PATIENCE:
            return
        self._waited = 0
        longest = max((request.limit for request in rows.requests), default=0)
        joiners: list[LiveRequest] = []
        while self._waiting and len(joiners) < free:
            longest = max(longest, self._waiting[0].limit)
            count = len(rows) + len(joiners) + 1
            if count > 1 and count * self._bytes_of(longest) > limits.cache_bytes:
                break
            joiners.append(self._waiting.popleft())
        if not joiners:
            return
        start = len(rows)
        rows.join(joiners)
        self._decoder.join(rows, start)

    def _bytes_of(self, tokens: int) -> int:
        """Return the memory of a request with so many tokens."""
        return self._decoder.bytes_per_row + rounded(tokens) * self._decoder.bytes_per_token
