"""Decodes requests of one length together, with the cache that transformers makes for the model.

A recurrent state, a compressed key or the keys of an indexer cannot be cut into padded rows. But any model computes a
batch of sequences of one length exactly as each of them alone, without padding and masks. So requests of one length
that join together are a cohort. A cohort has one forward per step and one cache. If a request ends, its part of the
cache is removed. Siblings of one prompt always are in one cohort.

A cohort without a cache computes all its tokens again. Each cohort starts so, drops its cache so after a weight update,
and runs so all the time if the model's cache is not exact.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from areal_core.models import without_image_tokens
from areal_hf import prompt_logprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from areal_hf.limits import Limits
    from areal_hf.rows import Rows
    from areal_vision.images import ImageInputs
    from areal_vision.places import VisionTokens

    _Sequence = tuple[tuple[int, ...], int]

_MEASURED_LENGTHS = (4, 36)
"""Lengths of two sequences whose caches are compared to find the memory of a row and of a token."""


@dataclass(slots=True)
class _Cohort:
    """Requests of one length.

    Attributes:
        rows: their rows.
        length: number of tokens of each request, without the newest.
        cache: cache of these tokens with a batch row for each of `rows`. None before the first step, or if the decoder
            keeps no cache.
    """

    rows: list[int]
    length: int
    cache: Any = None


class CohortDecoder:
    """A `Decoder` with one forward for each cohort.

    Args:
        model: model in evaluation mode, on its device, with frozen parameters.
        limits: limits of concurrent work.
        keeps_cache: False to compute all tokens again in each step.
        turning_point: number of tokens beyond which a rotary embedding has other frequencies, so that a cache of
            earlier tokens is wrong. None if its frequencies never change.
        vision: places images into sequences; None for a model without images.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        limits: Limits,
        *,
        keeps_cache: bool,
        turning_point: int | None,
        vision: VisionTokens | None,
    ) -> None:
        self._model = model
        self._limits = limits
        self._vision = vision
        self._keeps_cache = keeps_cache
        self._turning_point = turning_point
        names = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in names else "past_key_values"
        self._options: dict[str, Any] = {"use_cache": keeps_cache}
        if "logits_to_keep" in names:
            self._options["logits_to_keep"] = 1
        self._takes_positions = "position_ids" in names
        self._cohorts: list[_Cohort] = []
        self.bytes_per_row, self.bytes_per_token = self._measure()

    @torch.inference_mode()
    def _measure(self) -> tuple[int, int]:
        if not self._keeps_cache:
            return 0, 0
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None) or max(
            _MEASURED_LENGTHS
        )
        few, many = (min(length, longest) for length in _MEASURED_LENGTHS)
        sizes = []
        for length in (few, many):
            ids = torch.zeros(1, length, dtype=torch.int64, device=self._model.device)
            sizes.append(_size(self._forward(self._sequences(ids, [None]), None)[1]))
        per_token = -(-(sizes[1] - sizes[0]) // max(1, many - few))
        return max(0, sizes[0] - few * per_token), per_token

    def join(self, rows: Rows, start: int) -> None:
        """See `Decoder.join`."""
        by_length: dict[int, _Cohort] = {}
        for row, length in enumerate(rows.live("lengths")[start:].tolist(), start):
            by_length.setdefault(length, _Cohort([], length)).rows.append(row)
        self._cohorts += by_length.values()

    def rebuild(self, rows: Rows) -> None:
        """See `Decoder.rebuild`."""
        self._cohorts.clear()
        self.join(rows, 0)

    def logits(self, rows: Rows) -> torch.Tensor:
        """See `Decoder.logits`."""
        for cohort in self._cohorts:
            if cohort.length == self._turning_point:
                cohort.cache = None
        self._cohorts = [part for cohort in self._cohorts for part in self._split(cohort, rows)]
        logits = [self._advance(cohort, rows) for cohort in self._cohorts]
        order = torch.tensor([row for cohort in self._cohorts for row in cohort.rows], device=rows.device)
        return torch.cat(logits)[order.argsort()]

    def _split(self, cohort: _Cohort, rows: Rows) -> list[_Cohort]:
        """Split a cohort without a cache, so that the distinct sequences of each part fit into one forward."""
        if cohort.cache is not None:
            return [cohort]
        most = max(1, self._limits.prefill_tokens // (cohort.length + 1))
        parts: list[_Cohort] = []
        distinct: set[_Sequence] = set()
        for row, sequence in zip(cohort.rows, _sequences(rows, cohort.rows), strict=True):
            if not parts or len(distinct | {sequence}) > most:
                parts.append(_Cohort([], cohort.length))
                distinct.clear()
            parts[-1].rows.append(row)
            distinct.add(sequence)
        return parts

    def _advance(self, cohort: _Cohort, rows: Rows) -> torch.Tensor:
        """Return the logits [rows of the cohort, V] of its next tokens."""
        indices = torch.tensor(cohort.rows, device=rows.device)
        if cohort.cache is None:
            order: dict[_Sequence, int] = {}
            sequences = _sequences(rows, cohort.rows)
            source = [order.setdefault(sequence, len(order)) for sequence in sequences]
            images = [rows.requests[cohort.rows[source.index(number)]].images for number in range(len(order))]
            ids = torch.tensor([tokens for tokens, _ in order], device=rows.device)
            requests = [rows.requests[row] for row in cohort.rows]
            of_prompts = any(request.lacks_prompt_logprobs for request in requests)
            logits, cohort.cache = self._forward(self._sequences(ids, images), None, keeps_all=of_prompts)
            if of_prompts:
                prompt_logprobs.record(requests, source, logits)
            index = torch.tensor(source, device=rows.device)
            logits = logits[:, -1][index]
            _select(cohort.cache, index, len(order))
        else:
            newest = without_image_tokens(self._model.config, rows.live("last")[indices])
            positions = rows.live("lengths")[indices]
            if self._vision is not None:
                positions = positions + rows.live("offsets")[indices]
            inputs = {"input_ids": newest.unsqueeze(1), "position_ids": positions.unsqueeze(1)}
            logits, cohort.cache = self._forward(inputs, cohort.cache)
            logits = logits[:, -1]
        cohort.length += 1
        return logits

    def _sequences(self, ids: torch.Tensor, images: list[ImageInputs | None]) -> dict[str, torch.Tensor]:
        """Return the model's arguments for whole sequences [B, T] and their images."""
        if self._vision is None:
            ids = without_image_tokens(self._model.config, ids)
            return {"input_ids": ids, "position_ids": torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)}
        input_ids, positions = self._vision.place_rows(ids, images)
        return {"input_ids": input_ids, "position_ids": positions, **self._vision.shown(images)}

    def _forward(
        self, inputs: dict[str, torch.Tensor], cache: Any, *, keeps_all: bool = False
    ) -> tuple[torch.Tensor, Any]:
        """Return the logits [B, T, V] of some tokens, and the cache that includes them, or None if none is kept.

        Unless `keeps_all`, only the logits of the last token are needed, and T may be 1.
        """
        options = {**inputs, **self._options}
        if keeps_all and "logits_to_keep" in options:
            options["logits_to_keep"] = 0
        # Without positions, several models take them from the first layer's cache, which may have no keys.
        if not self._takes_positions:
            del options["position_ids"]
        if cache is not None:
            options[self._cache_name] = cache
        outputs = self._model(**options)
        if not self._keeps_cache:
            return outputs.logits, None
        if (cache := outputs.get(self._cache_name)) is None:
            raise ValueError("the model returns no cache")
        return outputs.logits, cache

    def remove(self, rows: Rows, ended: list[int], sources: list[int], targets: list[int]) -> None:
        """See `Decoder.remove`."""
        leaving, moved = set(ended), dict(zip(sources, targets, strict=True))
        for cohort in self._cohorts:
            kept = [index for index, row in enumerate(cohort.rows) if row not in leaving]
            if kept and len(kept) < len(cohort.rows):
                _select(cohort.cache, torch.tensor(kept, device=rows.device), len(cohort.rows))
            cohort.rows = [moved.get(cohort.rows[index], cohort.rows[index]) for index in kept]
        self._cohorts = [cohort for cohort in self._cohorts if cohort.rows]


def _sequences(rows: Rows, indices: list[int]) -> list[_Sequence]:
    """Return the tokens of some rows, including the newest, and the identity of their images."""
    newest = rows.live("last").tolist()
    histories = (history for row in indices for history in rows.histories(row, row + 1))
    return [
        ((*history, newest[row]), id(rows.requests[row].images))
        for row, history in zip(indices, histories, strict=True)
    ]


def _select(cache: Any, index: torch.Tensor, batch: int) -> None:
    """Select the batch rows `index` of a cache. `Cache.reorder_cache` omits the states of some models."""

    def select(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.index_select(0, index) if tensor.dim() and len(tensor) == batch else tensor

    if len(index) != batch or bool((index != torch.arange(batch, device=index.device)).any()):
        _replace(cache, select)


def _size(cache: Any) -> int:
    """Return the total bytes of all tensors of a cache."""
    sizes: dict[int, int] = {}

    def record(tensor: torch.Tensor) -> torch.Tensor:
        sizes[tensor.data_ptr()] = tensor.nbytes
        return tensor

    _replace(cache, record)
    return sum(sizes.values())


def _replace(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replace each tensor of a cache, of its layers, and of their lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_replace(item, change) for item in value)
    if isinstance(value, dict):
        return {key: _replace(item, change) for key, item in value.items()}
    if isinstance(value, Cache | CacheLayerMixin | LinearAttentionCacheLayerMixin):
        for name, item in [*vars(value).items()]:
            setattr(value, name, _replace(item, change))
    return value
