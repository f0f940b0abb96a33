"""Measure how a model scales, shifts or soft-caps its logits after the head, or scales the hidden states before it.

Configs name these numbers in many ways (`logit_scale`, `logits_scaling`, `final_logit_softcapping`,
`lm_head_multiplier`). So they are measured: in a forward pass, a hook appends known numbers to the head's output, and
the model's logits show their new values. This also finds a cap far above the model's logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch

from areal_core.errors import RunError
from areal_fsdp.parallel.tensor import body_of, text_of

if TYPE_CHECKING:
    from types import TracebackType

    from transformers import PreTrainedModel

_SMALL = 1e-3
_LARGE = 1e6
_MAGNITUDES = (1.0, 10.0, 100.0)
_ROWS = 2 + len(_MAGNITUDES) + 1
_TOLERANCE = 1e-3
"""Largest relative error of the formula. In float32 it is about 1e-6; a model that rounds to bfloat16 is refused."""
_ROUNDING = 1e-6


class FinalLogits(NamedTuple):
    """The formula of final logits: scale x c tanh(product / c), with c the cap; scale x product without a cap.

    `product` is the head's output. A shift of all logits of a token cancels in the softmax and is left out.

    Attributes:
        scale: factor of the logits.
        cap: soft cap of the head's output; None without one.
    """

    scale: float = 1.0
    cap: float | None = None


class HeadMeasurement:
    """A context in which one forward pass of a model measures its formula of final logits.

    Args:
        model: a causal language model with the linear head `get_output_embeddings()`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._kind = model.config.model_type
        self._head: Any = model.get_output_embeddings()
        if not isinstance(self._head, torch.nn.Linear):
            raise RunError(f"model type '{self._kind}' has no linear head: {type(self._head).__name__}")
        # Some models call their decoder directly, and in some the decoder contains the head.
        bodies = {body_of(model), text_of(model), model.get_decoder()}
        self._bodies: list[Any] = [body for body in bodies if self._head not in set(body.modules())]
        self._hooks: list[Any] = []
        self._states = self._inputs = self._products = torch.zeros(0)

    def __enter__(self) -> Self:
        self._hooks = [body.register_forward_hook(self._keep_states) for body in self._bodies]
        self._hooks.append(self._head.register_forward_hook(self._append))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    def _keep_states(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        if isinstance(output[0], torch.Tensor) and output[0].is_floating_point():
            self._states = output[0]

    def _append(self, _: torch.nn.Module, inputs: tuple[torch.Tensor, ...], product: torch.Tensor) -> torch.Tensor:
        self._inputs = inputs[0]
        rows, words = len(product), product.shape[-1]
        generator = torch.Generator().manual_seed(0)
        draws = [size * (2 * torch.rand(words, generator=generator) - 1) for size in _MAGNITUDES]
        known = torch.stack(
            [torch.zeros(words), torch.full((words,), _SMALL), *draws, torch.full((words,), _LARGE)]
        ).to(product.device)
        self._products = known
        return torch.cat([product, known.expand(rows, *known.shape)], 1)  # a bfloat16 product is promoted to float32

    def read(self, logits: torch.Tensor) -> tuple[torch.Tensor, FinalLogits]:
        """Split the model's final logits into those of the tokens and the measurement.

        Args:
            logits: [B, T + appended rows, vocabulary].

        Returns:
            The logits of the tokens, [B, T, vocabulary] float32; and the formula.

        Raises:
            RunError: the formula does not describe the model.
        """
        tokens, measured = logits[:, :-_ROWS].float(), logits[0, -_ROWS:].float()
        if not torch.isfinite(self._states).all():  # nothing can be measured; the probe then reports infinite outputs
            return tokens, FinalLogits()
        before = _factor(self._inputs.float(), self._states.to(self._inputs.dtype).float())
        if before is None or (before != 1 and self._head.bias is not None):
            raise self._refusal("its head does not get the hidden states that its layers end with")
        shift = measured[0, :1]
        known, measured = self._products, measured - shift
        top = float(measured[-1, 0])
        slope = float(measured[1, 0]) / _SMALL
        is_capped = abs(top) < 0.5 * abs(slope) * _LARGE
        slope = 1.0 if abs(slope - 1) < _ROUNDING else slope
        cap = top / slope if is_capped and slope else None
        scale = slope if is_capped else top / _LARGE
        expected = scale * (known if cap is None else cap * torch.tanh(known / cap))
        error = ((measured - expected).abs() / (expected.abs() + _TOLERANCE)).nan_to_num(nan=torch.inf)
        if not float(error.max()) <= _TOLERANCE or not scale * before > 0:
            raise self._refusal("logits are not the head's output scaled, shifted or soft-capped")
        return tokens, FinalLogits(scale * before, None if cap is None else cap / before)

    def _refusal(self, reason: str) -> RunError:
        return RunError(
            f"model type '{self._kind}' changes its logits in a way that this engine does not reproduce: {reason}",
            hints=["use another model: this engine supports one scale, shift and soft cap for all logits of a token"],
        )


def _factor(scaled: torch.Tensor, states: torch.Tensor) -> float | None:
    """Return the factor between `states` and `scaled`; None if they are not proportional."""
    if scaled.shape != states.shape:
        return None
    if torch.equal(scaled, states):
        return 1.0
    factor = float((scaled * states).sum() / (states * states).sum())
    error = (scaled - factor * states).abs().max() / scaled.abs().max()
    return factor if float(error) <= 2**-7 else None  # one rounding to bfloat16
