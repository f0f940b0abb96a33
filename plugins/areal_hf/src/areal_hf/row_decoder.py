"""Decodes all live requests in one forward. Each is a row of the engine's own KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.models import without_image_tokens
from areal_core.servers import SamplingParameters
from areal_hf import prompt_logprobs
from areal_hf.cache import RowCache, rounded
from areal_hf.rows import LiveRequest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from areal_hf.experts import RoutedExperts
    from areal_hf.limits import Limits
    from areal_hf.masks import AttentionMasks
    from areal_hf.rows import Rows
    from areal_vision.images import ImageInputs
    from areal_vision.places import VisionTokens

    _Prompt = tuple[tuple[int, ...], int]


class RowDecoder:
    """A `Decoder` with one forward for all rows.

    A prefill caches the tokens of a joining request except the last, which is the input of the next step. Rebuilding
    the cache after a weight update is the same operation on live rows, which include generated tokens.

    Args:
        model: model in evaluation mode, on its device, with frozen parameters.
        limits: limits of concurrent work.
        masks: masks of the model's layers.
        vision: places images into sequences; None for a model without images.
    """

    bytes_per_row = 0
    experts: RoutedExperts | None
    """Records the routed experts of each token, if the run requests them."""
    layers: int
    """Number of layers with keys and values."""

    def __init__(
        self, model: PreTrainedModel, limits: Limits, masks: AttentionMasks, vision: VisionTokens | None
    ) -> None:
        self.experts = None
        self._model = model
        self._limits = limits
        self._masks = masks
        self._vision = vision
        self.cache = RowCache(model.config.get_text_config(decoder=True).num_hidden_layers)
        self.bytes_per_token = self._measure()

    @torch.inference_mode()
    def _measure(self) -> int:
        """Return the cache's bytes per token, measured by a forward: each model family has its own shapes."""
        self.cache.fit(1, 1, 0, 0, 1)
        self._prefill(0, [[0]], [LiveRequest(0, [0, 0], SamplingParameters(), seed=0)])
        size = self.cache.bytes_per_token
        self.layers = sum(layer.is_initialized for layer in self.cache.layers)
        self.cache.reset()
        return size

    def join(self, rows: Rows, start: int) -> None:
        """See `Decoder.join`."""
        self._fit(len(rows), rows.longest + 1, start)
        self._fill(rows, start)

    def rebuild(self, rows: Rows) -> None:
        """See `Decoder.rebuild`."""
        self._fill(rows, 0, is_rebuild=True)

    def logits(self, rows: Rows) -> torch.Tensor:
        """See `Decoder.logits`."""
        self._fit(len(rows), rows.longest + 1, len(rows))
        lengths = rows.live("lengths")
        width = self.cache.attended_width(rows.longest)
        self.cache.append(lengths, width)
        last, positions = without_image_tokens(self._model.config, rows.live("last")), lengths
        if self._vision is not None:
            positions = lengths + rows.live("offsets")
        logits: torch.Tensor = self._model(
            input_ids=last.unsqueeze(1),
            attention_mask=self._masks.for_tokens(lengths, width),
            position_ids=positions.unsqueeze(1),
            past_key_values=self.cache,
            use_cache=True,
        ).logits[:, -1]
        if self.experts is not None:
            self.experts.append(lengths, rows.longest)
        return logits

    def remove(self, rows: Rows, ended: list[int], sources: list[int], targets: list[int]) -> None:
        """See `Decoder.remove`."""
        del ended
        if sources:
            source_rows, target_rows = (torch.tensor(indices, device=rows.device) for indices in (sources, targets))
            # The cache includes the newest token, so `longest` columns are in use.
            self.cache.move(source_rows, target_rows, rows.longest)
        if not len(rows):
            # This also makes later results independent of earlier requests, even of the tensors' strides.
            self.cache.reset()

    def _fit(self, count: int, columns: int, live_rows: int) -> None:
        """Fit the cache to rows and columns. The first `live_rows` rows are in use."""
        most = self._limits.cache_bytes // max(1, rounded(columns) * self.bytes_per_token)
        self.cache.fit(count, columns, live_rows, self.cache.capacity[1], min(self._limits.requests, most))

    def _fill(self, rows: Rows, start: int, *, is_rebuild: bool = False) -> None:
        """Cache all tokens but the newest of the rows from `start` on, in forwards of limited size."""
        histories = rows.histories(start, len(rows))
        requests = rows.requests[start:]
        chunk: list[list[int]] = []
        distinct: set[_Prompt] = set()
        longest = done = 0
        for history, request in zip(histories, requests, strict=True):
            longest = max(longest, len(history))
            grown = distinct | {_prompt(history, request.images)}
            if chunk and len(grown) * longest > self._limits.prefill_tokens:
                self._prefill(start + done, chunk, requests[done : done + len(chunk)], is_rebuild=is_rebuild)
                done += len(chunk)
                chunk, grown, longest = [], {_prompt(history, request.images)}, len(history)
            chunk.append(history)
            distinct = grown
        self._prefill(start + done, chunk, requests[done:], is_rebuild=is_rebuild)

    def _prefill(
        self, start: int, histories: list[list[int]], requests: list[LiveRequest], *, is_rebuild: bool = False
    ) -> None:
        """Run one forward over the distinct histories. Siblings with one prompt share its computation.

        Args:
            start: the first row.
            histories: tokens of the rows from `start` on.
            requests: requests of these rows.
            is_rebuild: True if the rows were cached before, with old weights.
        """
        order: dict[_Prompt, int] = {}
        first: list[int] = []
        source = []
        for index, history in enumerate(histories):
            key = _prompt(history, requests[index].images)
            if key not in order:
                order[key] = len(order)
                first.append(index)
            source.append(order[key])
        longest = max(len(history) for history in histories)
        if not longest:
            return
        device = self._model.device
        padded = [[*histories[index], *[0] * (longest - len(histories[index]))] for index in first]
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        if self._vision is None:
            ids = without_image_tokens(self._model.config, ids)
        positions = torch.arange(longest, device=device).expand(len(order), longest)
        image_inputs: dict[str, torch.Tensor] = {}
        if self._vision is not None:
            distinct_images = [requests[index].images for index in first]
            ids, positions = self._vision.place_rows(ids, distinct_images)
            image_inputs = self._vision.shown(distinct_images)
        sources = torch.tensor(source, dtype=torch.int64, device=device)
        self.cache.fill(start, sources)
        of_prompts = any(request.lacks_prompt_logprobs for request in requests)
        logits = self._model(
            input_ids=ids,
            attention_mask=self._masks.for_prompts(len(order), longest, device),
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=0 if of_prompts else 1,  # 0 keeps all
            **image_inputs,
        ).logits
        if of_prompts:
            prompt_logprobs.record(requests, source, logits)
        if self.experts is not None and is_rebuild:
            self.experts.take_choices()
        elif self.experts is not None:
            self.experts.fill(start, sources, longest)


def _prompt(history: list[int], images: ImageInputs | None) -> _Prompt:
    """Return what distinguishes prompts. Siblings share the object of their images."""
    return tuple(history), id(images)
