"""Decodes all live requests in one forward, each a row of the engine's own cache of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.models import without_image_tokens
from areal_hf.cache import RowCache, rounded

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

    A joining request's prompt, but for its last token, is put into the cache; the last token is then an ordinary step's
    input. Rebuilding the cache under new weights is the same operation on live rows, with what they have generated
    behind their prompts.

    Args:
        model: in evaluation mode, on its device, with frozen parameters.
        limits: what runs at once.
        masks: of the model's layers.
        vision: what it does with image tokens; None where it sees no images.
    """

    bytes_per_row = 0
    experts: RoutedExperts | None
    """Records the experts of each token, where the run asks for them."""
    layers: int
    """layers that hold keys and values"""

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
        """Bytes of the cache for one token, asked of the model itself: every family has its own shapes."""
        self.cache.fit(1, 1, 0, 0, 1)
        self._prefill(0, [[0]], [None])
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
        self._fill(rows, 0, is_again=True)

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
            origins, places = (torch.tensor(each, device=rows.device) for each in (sources, targets))
            # The newest token's keys are in the cache already, so `longest` columns hold something.
            self.cache.move(origins, places, rows.longest)
        if not len(rows):
            # Memory back; and what is generated next does not depend on what ran before, not even in its strides.
            self.cache.reset()

    def _fit(self, count: int, columns: int, live_rows: int) -> None:
        """Make room for rows and columns; the first `live_rows` rows hold something."""
        most = self._limits.cache_bytes // max(1, rounded(columns) * self.bytes_per_token)
        self.cache.fit(count, columns, live_rows, self.cache.capacity[1], min(self._limits.requests, most))

    def _fill(self, rows: Rows, start: int, *, is_again: bool = False) -> None:
        """Put everything but the newest token of the rows from `start` on into the cache, in forwards of limited size;
        `is_again`, under new weights."""
        histories = rows.histories(start, len(rows))
        images = [request.images for request in rows.requests[start:]]
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
        device = self._model.device
        padded = [[*histories[place], *[0] * (longest - len(histories[place]))] for place in first]
        ids = torch.tensor(padded, dtype=torch.int64, device=device)
        if self._vision is None:
            ids = without_image_tokens(self._model.config, ids)
        positions = torch.arange(longest, device=device).expand(len(order), longest)
        shown: dict[str, torch.Tensor] = {}
        if self._vision is not None:
            seen = [images[place] for place in first]
            ids, positions = self._vision.place_rows(ids, seen)
            shown = self._vision.shown(seen)
        sources = torch.tensor(source, dtype=torch.int64, device=device)
        self.cache.fill(start, sources)
        self._model(
            input_ids=ids,
            attention_mask=self._masks.for_prompts(len(order), longest, device),
            position_ids=positions,
            past_key_values=self.cache,
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
