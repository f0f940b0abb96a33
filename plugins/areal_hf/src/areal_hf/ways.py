"""Finds the way in which the engine generates with a model: its log-probabilities must equal a plain forward's.

    rows      one forward for all requests, each a row of the engine's own KV cache: the fastest
    cohorts   one forward for the requests of one length, with the cache that transformers makes for the model
    whole     the same without a cache: every step computes all tokens again
    refused   no way is exact

A model takes the first way whose outputs equal those of a forward over whole sequences while requests join, wait and
leave. Four kinds of faults do not show in a trial with a few tokens, so each has its own check: masks that only later
differ from causal ones (`asked`), frequencies that change with the length (`_turning_point`), keys that are chosen only
in long sequences (`_refuse_chosen_keys`), and time steps that are rarely limited (`_refuse_limited_steps`).
"""

from __future__ import annotations

from contextlib import suppress
from enum import StrEnum
from functools import partial
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

import torch

from areal_core.errors import RunError
from areal_core.models import FAMILIES, set_attention, without_image_tokens
from areal_core.plugins import extra_module
from areal_core.servers import SamplingParameters
from areal_hf.asked import Asked, asked_of_attention
from areal_hf.attention import NAME as GROUPED
from areal_hf.cohorts import CohortDecoder
from areal_hf.limits import Limits
from areal_hf.masks import AttentionMasks
from areal_hf.row_decoder import RowDecoder
from areal_hf.rows import LiveRequest, Rows
from areal_hf.weights import WeightLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from areal_hf.decoder import Decoder
    from areal_vision.places import VisionTokens

_PROMPTS = (9, 5, 5, 3)
_NEW = 8
_TOLERANCE = 1e-4
"""Largest difference of a token's log-probabilities in float32, if none is below `-_MODERATE`."""
_MODERATE = 10.0
"""If log-probabilities are larger, the tolerance grows with the largest, because rounding errors do."""
_LEAST_ROUNDING, _ROUNDING_FACTOR = 0.01, 4.0
"""Largest median error of a sequence in other dtypes: the larger of this number, and this factor times the median error
of whole sequences in a batch."""


class Way(StrEnum):
    """A way in which the engine generates with a model; see the module's docstring."""

    ROWS = "rows"
    COHORTS = "cohorts"
    WHOLE = "whole"
    REFUSED = "refused"


class Choice(NamedTuple):
    """The way for a model and the reason for it.

    Attributes:
        way: the way.
        reason: why the engine takes no faster way; empty for `rows`.
        attention: name of the attention implementation.
    """

    way: Way
    reason: str
    attention: str = ""


class _Generated(NamedTuple):
    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]


class _UnfitError(Exception):
    """A way is not exact for a model. The message is the reason."""


def choose_way(model: PreTrainedModel, longest: int | None = None) -> Choice:
    """Find the fastest exact way for a model in the embedded engine, and set its attention.

    Args:
        model: model in evaluation mode, on its device.
        longest: largest number of tokens of a sequence; the model's context by default.
    """
    try:
        WeightLoader(model)
        trial = _Trial(model, longest)
    except (RunError, _UnfitError) as fault:
        return Choice(Way.REFUSED, _first_sentence(fault))
    reasons: dict[str, None] = {}
    for way, attention, attempt in trial.attempts():
        try:
            set_attention(model, attention)
            attempt()
        except torch.OutOfMemoryError:
            raise
        except Exception as fault:  # noqa: BLE001 - a model may raise anything; it is reported, and the next way is tried
            reasons[f"{way}: {_first_sentence(fault)}"] = None
        else:
            return Choice(way, "; ".join(reasons), attention)
    return Choice(Way.REFUSED, "; ".join(reasons))


def decoder_of(choice: Choice, model: PreTrainedModel, limits: Limits, vision: VisionTokens | None) -> Decoder:
    """Return the decoder of a way that `choose_way` has found."""
    if choice.way is Way.ROWS:
        return RowDecoder(model, limits, _masks(model, choice.attention), vision)
    return CohortDecoder(
        model,
        limits,
        keeps_cache=choice.way is Way.COHORTS,
        turning_point=_turning_point(model, limits.sequence_length),
        vision=vision,
    )


def vision_of(model: PreTrainedModel) -> VisionTokens | None:
    """Return how images are placed. None if the model takes none, or areal-vision is not installed."""
    if model.config.model_type not in FAMILIES:
        return None
    with suppress(RunError):
        tokens: VisionTokens = extra_module("areal_vision.places", "hf", "vision").VisionTokens(model)
        return tokens
    return None


def _masks(model: PreTrainedModel, attention: str) -> AttentionMasks:
    config = model.config.get_text_config(decoder=True)
    return AttentionMasks(config, model.dtype, explicit=attention != GROUPED)


def _turning_point(model: PreTrainedModel, longest: int) -> int | None:
    """Return the length beyond which a `longrope` embedding changes its frequencies, or None if none is reached."""
    settings = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    groups = [settings, *(value for value in settings.values() if isinstance(value, dict))]
    points = [group.get("original_max_position_embeddings") for group in groups if group.get("rope_type") == "longrope"]
    return min((int(point) for point in points if point and point < longest), default=None)


def _first_sentence(fault: Exception) -> str:
    """Return the first sentence of an error, with its type if it is not an error of areal."""
    if isinstance(fault, RunError):
        return fault.message
    first = (str(fault).splitlines() or [""])[0].split(". ")[0]
    return first if isinstance(fault, _UnfitError) else f"{type(fault).__name__}: {first}"


def _largest_median(errors: list[torch.Tensor]) -> float:
    return max(float(error.median()) for error in errors)


class _Trial:
    """Tries the ways with a model.

    Args:
        model: model in evaluation mode, on its device.
        longest: see `choose_way`.

    Raises:
        _UnfitError: transformers cannot run the model, or its outputs are not finite.
        RunError: the model places images in an unknown way.
    """

    def __init__(self, model: PreTrainedModel, longest: int | None) -> None:
        config = model.config.get_text_config(decoder=True)
        context = getattr(config, "max_position_embeddings", None)
        self._model = model
        self._vocabulary = config.vocab_size
        self._longest = min((length for length in (longest, context) if length), default=1 << 40)
        self._vision = vision_of(model)
        self._turning_point = _turning_point(model, self._longest)
        self._limits = Limits(len(_PROMPTS), self._longest, 1 << 40, 1 << 20)
        self._allowed: float | None = None
        self._asked, self._fault = Asked(0, [], ""), ""
        self._probe_attention()

    def _probe_attention(self) -> None:
        ids = torch.arange(min(_PROMPTS[0], self._longest), device=self._model.device)[None] % self._vocabulary
        masks = None
        try:
            masks = _masks(self._model, "")
        except ValueError as fault:
            self._fault = str(fault)
        try:
            self._asked = asked_of_attention(self._model, masks, ids)
        except Exception as fault:  # noqa: BLE001 - a model may raise anything with an attention that it does not support
            self._fault = self._fault or f"its attention does not show its masks: {_first_sentence(fault)}"
        self._fault = self._fault or self._asked.fault

    def attempts(self) -> Iterator[tuple[Way, str, Callable[[], None]]]:
        """Yield the ways in order, each with its attention and a function that raises an error if it is not exact."""
        is_plain = self._asked.layers > 0 and not self._asked.more and self._model._supports_sdpa
        yield Way.ROWS, GROUPED if is_plain else "eager", self._try_rows
        for way in (Way.COHORTS, Way.WHOLE):
            for attention in ("sdpa", "eager") if is_plain else ("eager",):
                yield way, attention, partial(self._try_cohorts, way)

    def _try_rows(self) -> None:
        if self._turning_point is not None:
            raise _UnfitError(
                f"its rotary embedding has other frequencies beyond {self._turning_point} tokens "
                f"(max_sequence_length: {self._turning_point} avoids that)"
            )
        if getattr(self._model, "_is_stateful", False):
            raise _UnfitError("it keeps a state beside keys and values")
        if self._fault:
            raise _UnfitError(self._fault)
        decoder = RowDecoder(self._model, self._limits, _masks(self._model, self._attention), self._vision)
        if self._asked.layers < decoder.layers:
            raise _UnfitError(f"{self._asked.layers} of {decoder.layers} attention layers show their masks")
        self._check(self._generate(decoder))

    def _try_cohorts(self, way: Way) -> None:
        self._refuse_chosen_keys()
        if way is Way.COHORTS:
            self._refuse_limited_steps()
        self._check(self._generate(decoder_of(Choice(way, ""), self._model, self._limits, self._vision)))

    def _refuse_chosen_keys(self) -> None:
        """Refuse attention that chooses keys among all tokens of a longer sequence (Doge).

        A token's output then depends on later tokens, so that a forward over the whole sequence cannot reproduce it.
        """
        for module in self._model.modules():
            window = getattr(module, "keep_window_size", None)
            if window is not None and window < self._longest:
                raise _UnfitError(
                    f"{type(module).__name__} chooses keys among later tokens too in sequences of more than {window} "
                    f"tokens (max_sequence_length: {window} avoids that)"
                )

    def _refuse_limited_steps(self) -> None:
        """Refuse mixers that limit their time step in a forward over a sequence, but not in a step with a cache."""
        for module in self._model.modules():
            lowest, highest = getattr(module, "time_step_limit", None) or (0.0, inf)
            if lowest > 0 or highest < inf:
                raise _UnfitError(
                    f"{type(module).__name__} bounds its time step in a forward over a sequence, "
                    "and transformers leaves that out in a step with a cache"
                )

    @torch.inference_mode()
    def _generate(self, decoder: Decoder) -> list[_Generated]:
        """Generate with requests that join and leave."""
        rows = Rows(len(_PROMPTS), self._model.device)
        generator = torch.Generator().manual_seed(0)
        new = max(1, min(_NEW, self._longest // 2))
        prompts = []
        for length in _PROMPTS:
            size = max(1, min(length, self._longest - new))
            prompts.append(torch.randint(self._vocabulary, (size,), generator=generator).tolist())
        prompts[2] = prompts[1]  # siblings
        sampling = SamplingParameters(max_new_tokens=new)
        requests = [LiveRequest(seed, prompt, sampling, seed) for seed, prompt in enumerate(prompts)]
        results: dict[int, _Generated] = {}

        def join(joiners: list[LiveRequest]) -> None:
            start = len(rows)
            rows.join(joiners)
            decoder.join(rows, start)

        def leave(ended: list[int]) -> None:
            outputs = rows.take(ended)
            parts = (torch.split(flat, outputs.counts) for flat in (outputs.tokens, outputs.logprobs))
            for number, tokens, logprobs in zip(outputs.numbers, *parts, strict=True):
                results[number] = _Generated(prompts[number], tokens.tolist(), logprobs.tolist())
            decoder.remove(rows, ended, *rows.remove(ended))

        join(requests[:3])
        for step in range(new):
            if step == new // 3:
                join(requests[3:])
            if step == new // 2:
                leave([1])
            rows.sample(decoder.logits(rows), 0)
        leave([*range(len(rows))])
        return [results[number] for number in sorted(results)]

    def _check(self, generated: list[_Generated]) -> None:
        """Compare log-probabilities with those of plain forwards.

        Raises:
            _UnfitError: they differ by more than the tolerance.
        """
        errors = self._errors(generated)
        if self._model.dtype is torch.float32:
            error, allowed = max(float(sequence.max()) for sequence in errors), _TOLERANCE
        else:
            error, allowed = _largest_median(errors), self._rounding()
        if error > allowed:
            raise _UnfitError(f"its log-probabilities differ from a plain forward's by {error:.3g}")

    def _rounding(self) -> float:
        """Return the largest median error of a sequence in low precision, where a batch rounds differently.

        The largest error is useless: rounding changes choices of routers, which moves single tokens by any amount. A
        median over all sequences would hide a sequence that is wrong as a whole.
        """
        if self._allowed is None:
            decoder = decoder_of(Choice(Way.WHOLE, ""), self._model, self._limits, self._vision)
            errors = self._errors(self._generate(decoder))
            self._allowed = max(_LEAST_ROUNDING, _ROUNDING_FACTOR * _largest_median(errors))
        return self._allowed

    @torch.inference_mode()
    def _errors(self, generated: list[_Generated]) -> list[torch.Tensor]:
        """Return each sequence's differences [T] from a plain forward, scaled down if log-probabilities are large."""
        attention = self._attention
        set_attention(self._model, "eager")
        try:
            expected = [self._expected(sequence) for sequence in generated]
        finally:
            set_attention(self._model, attention)
        largest = float(torch.cat(expected).abs().max())
        if not isfinite(largest):
            raise _UnfitError("the outputs of a plain forward are not finite")
        computed = [torch.tensor(sequence.logprobs, dtype=torch.float64) for sequence in generated]
        scale = max(1.0, largest / _MODERATE)
        return [(own - plain).abs().nan_to_num(nan=inf) / scale for own, plain in zip(computed, expected, strict=True)]

    @property
    def _attention(self) -> str:
        name: str = self._model.config.get_text_config(decoder=True)._attn_implementation
        return name

    def _expected(self, generated: _Generated) -> torch.Tensor:
        """Return log-probabilities [T] float64 of generated tokens by a plain forward over the tokens before each."""
        tokens = torch.tensor([*generated.prompt, *generated.tokens], device=self._model.device)
        input_ids = without_image_tokens(self._model.config, tokens)
        first, last = len(generated.prompt), len(tokens)
        if self._turning_point is None:
            logits = self._model(input_ids=input_ids[None], use_cache=False).logits[0, first - 1 : -1]
        else:
            forwards = (self._model(input_ids=input_ids[None, :end], use_cache=False) for end in range(first, last))
            logits = torch.stack([forward.logits[0, -1] for forward in forwards])
        return torch.log_softmax(logits.double(), -1).gather(1, tokens[first:, None])[:, 0].cpu()
