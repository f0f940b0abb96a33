"""Choose at setup how a model computes a batch, by comparing this engine with transformers on a few tokens.

The methods are the rungs of a ladder, from the fastest down:

    packed      sequences are concatenated, with packed attention; other layers may get the sequences' bounds
    mixers      the same, except that layers which mix tokens outside attention compute a padded row per sequence
    rows        the whole model computes a padded row per sequence, with transformers' own masks and attention

A model uses the first rung on which its results equal those for each sequence alone. Setup fails if there is none. A
comparison on short sequences misses three kinds of faults, which have separate checks: masks that equal a causal mask
at short distances (`CHECKED`), layers with a fading memory (`Leaks`), and logits far below their cap
(`HeadMeasurement`).
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from areal_core.errors import RunError
from areal_core.models import set_attention
from areal_fsdp.attention.asked import CHECKED, SDPA, checked_sdpa
from areal_fsdp.attention.hugging_face import PACKED
from areal_fsdp.models.final_logits import FinalLogits
from areal_fsdp.models.mixers import Leaks
from areal_fsdp.parallel.loading import refuse_damaged_weights
from areal_fsdp.parallel.ranks import each_on_any_rank, fail_together, on_any_rank, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.parallel.loading import ModelFiles

log = logging.getLogger(__name__)

_LENGTHS = (9, 5, 3)
"""Lengths of the probes. `Leaks` recognizes packed tokens by their total, 17, which is not a usual width."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""Largest difference of two log-probabilities of a token if none is below `-_MODERATE`; see `Tolerance`."""
_MODERATE = 10.0
"""Beyond it the tolerance grows with the largest log-probability, because rounding errors are relative to the logits.

Pretrained models give the probe's random tokens log-probabilities of -20 and less, from logits above 30.
"""


class Rung(StrEnum):
    """A method to compute a batch; see the module's docstring."""

    PACKED = "packed"
    MIXERS = "mixers"
    ROWS = "rows"


class Choice(NamedTuple):
    """The result of `choose_rung`.

    Attributes:
        rung: the rung that the model uses.
        reasons: for each rung above it, why it failed.
    """

    rung: Rung
    reasons: list[str]


class Expected(NamedTuple):
    """Results of the model's own forward for the probes.

    Attributes:
        values: for each probe, [T] float32: log-probabilities, or values of a scalar head.
        final: scale and cap of the logits.
    """

    values: list[torch.Tensor]
    final: FinalLogits


class Tolerance(NamedTuple):
    """The largest allowed difference from the expected values.

    In half precision, only half of each sequence's tokens must be within it: rounding may change a router's choice, and
    another expert changes a token's value by any amount.

    Attributes:
        allowed: the largest allowed difference.
        is_exact: True if every token must be within it.
    """

    allowed: float
    is_exact: bool

    def distance(self, computed: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
        """Return the largest difference, or in half precision the largest median of a sequence; infinite for NaN.

        Args:
            computed: [T] for each sequence.
            wanted: the expected values, in the same form.
        """
        pairs = zip(computed, wanted, strict=True)
        differences = [(actual - expected).abs().nan_to_num(nan=torch.inf) for actual, expected in pairs]
        is_exact = self.is_exact or not all(bool(torch.isfinite(row).all()) for row in differences)
        return max(float(row.max() if is_exact else row.median()) for row in differences)


class UnfitError(Exception):
    """A rung's results differ from the model's own; the message is the reason."""


def expected_outputs(module: RoleModule, device: torch.device, *, together: bool = False) -> Expected:
    """Compute each probe with the model's own forward: one by one, or all in one batch with padding on the right.

    Raises:
        RunError: transformers cannot compute the model, or the model changes its logits in an unsupported way.
    """
    sequences = probes(module, device)
    batches = [sequences] if together else [[sequence] for sequence in sequences]
    values, final = list[torch.Tensor](), FinalLogits()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                results, final = module.unpacked(pad_sequence(batch, batch_first=True))
                values += _values_of(module, batch, results)
    except (RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RunError(
            f"transformers' own forward of model type '{module.model.config.model_type}' fails on {sum(_LENGTHS)} "
            f"tokens: {_reason(error)}",
            hints=[
                "check that its config.json fits its weights, and that the libraries it needs are installed",
                "if the error is about dtypes, set model.dtype to float32: some models support no other",
            ],
        ) from error
    return Expected(values, final)


def expected_before_division(module: RoleModule, files: ModelFiles | None) -> Expected:
    """Return `expected_outputs` of a model before its layers are split over ranks; collective.

    If the parameters are still in the files, rank 0 streams the model layer by layer, in one pass for all probes, and
    broadcasts the results.
    """
    device = torch.device("cpu")
    if files is None:
        return expected_outputs(module, device)
    lengths = [len(sequence) for sequence in probes(module, device)]
    message, failure = torch.zeros(sum(lengths) + 2, dtype=torch.float64), None
    if rank_and_ranks()[0] == 0:
        try:
            with files.streamed(module.model, decoder_layers(module.model)):
                values, final = expected_outputs(module, device, together=True)
                message = torch.cat([*values, torch.tensor([final.scale, final.cap or 0.0], dtype=torch.float64)])
        except Exception as error:  # noqa: BLE001 - the other ranks wait in fail_together
            failure = error
    fail_together(failure, f"computing a probe with the undivided model type '{module.model.config.model_type}'")
    dist.broadcast(message, 0)
    scale, cap = message[-2:].tolist()
    return Expected(list(torch.split(message[:-2].float(), lengths)), FinalLogits(scale, cap or None))


@torch.no_grad()
def choose_rung(
    module: RoleModule,
    device: torch.device,
    dtype: torch.dtype,
    expected: Expected | None = None,
    *,
    only_packed: str = "",
) -> Choice:
    """Set `module` to the first rung whose results equal those of the model's own forward; collective.

    All ranks choose the same rung.

    Args:
        module: the module, on the device.
        device: device of the computation.
        dtype: dtype of the computation.
        expected: result of `expected_before_division`; None if the model's layers are not split over ranks.
        only_packed: name of a setting that works only with the rung `packed`; empty for none.

    Raises:
        RunError: all rungs fail (the error names the model type and each reason), or outputs are not finite.
    """
    kind = module.model.config.model_type
    expected = expected_outputs(module, device) if expected is None else expected
    module.final = expected.final
    expected = expected._replace(values=[values.to(device) for values in expected.values])
    refuse_infinite_outputs(module, dtype, expected)
    if module.rotary and only_packed:
        raise RunError(
            f"model type '{kind}' chooses the frequencies of its rotary embedding by the length of a sequence, which "
            f"{only_packed} does not support",
            hints=[f"set {only_packed} to 1"],
        )
    tolerance = tolerance_of(dtype, expected)
    reasons: list[str] = []
    with torch.compiler.set_stance("force_eager"):  # the first call would tune compiled code for the probe's sizes
        for rung, attempt in _attempts(module, device, expected, tolerance):
            if rung is not Rung.PACKED and only_packed:
                raise RunError(
                    f"model type '{kind}' cannot be packed, but {only_packed} needs packed sequences: "
                    + "; ".join(reasons),
                    hints=[f"set {only_packed} to 1; more ranks, and parallel.expert, work with it"],
                )
            if not (reason := _failure(attempt)):
                _report(module, rung, reasons)
                return Choice(rung, reasons)
            reasons.append(f"{rung}: {reason}")
    raise RunError(
        f"this engine does not compute what transformers computes for model type '{kind}': " + "; ".join(reasons),
        hints=["choose another model; docs/reference/models.md lists tested models"],
    )


def _attempts(
    module: RoleModule, device: torch.device, expected: Expected, tolerance: Tolerance
) -> Iterator[tuple[Rung, Callable[[], None]]]:
    """Yield the rungs in their order, each with a function that sets the module to the rung and raises if it fails."""
    sequences = probes(module, device)
    leaking: list[str] = []

    def packed() -> None:
        _check_masks(module, sequences[0])
        module.shows_boundaries = False
        module.mixers.found = _leaking(module, sequences)
        if module.mixers.found:
            module.shows_boundaries = True
            leaking.extend(_leaking(module, sequences))
        if leaking:
            kinds = sorted({type(module.model.get_submodule(name)).__name__ for name in leaking})
            raise UnfitError(f"{', '.join(kinds)} mixes tokens of packed sequences outside attention")
        check_values(module, sequences, expected, tolerance)

    def mixers() -> None:
        for name in leaking:
            module.mixers.add(name)
        if still := _leaking(module, sequences):
            raise UnfitError(f"tokens of packed sequences mix in {still[0]} even where it computes rows")
        check_values(module, sequences, expected, tolerance)
        _check_causality(module, sequences, tolerance)

    def rows(attention: str) -> Callable[[], None]:
        def attempt() -> None:
            if module.vision is not None:
                raise UnfitError("rows do not support images, and this model sees some")
            module.attend_by(attention)
            module.mixers.names = []
            with checked_sdpa():
                check_values(module, sequences, expected, tolerance)
                _check_causality(module, sequences, tolerance)

        return attempt

    yield Rung.PACKED, packed
    if leaking:
        yield Rung.MIXERS, mixers
    yield Rung.ROWS, rows(SDPA)
    yield Rung.ROWS, rows("eager")


def _failure(attempt: Callable[[], None]) -> str:
    """Return why an attempt fails on any rank; empty if it succeeds on all ranks."""
    reason = ""
    try:
        attempt()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model's code may raise anything; the next rung is tried
        reason = _reason(error)
    has_failed = on_any_rank(bool(reason))
    return reason or ("it fails on another rank" if has_failed else "")


def _reason(error: Exception) -> str:
    """Return the first sentence of an error, with the type of errors from other libraries."""
    first = (str(error).splitlines() or [""])[0].split(". ")[0]
    return first if isinstance(error, RunError | UnfitError) else f"{type(error).__name__}: {first}"


def _report(module: RoleModule, rung: Rung, reasons: list[str]) -> None:
    if rank_and_ranks()[0]:
        return
    method = {
        Rung.PACKED: "its sequences are packed",
        Rung.MIXERS: f"its sequences are packed, and {len(module.mixers.names)} mixers compute them in rows",
        Rung.ROWS: f"each sequence is a padded row, with attention '{module.attention}'",
    }[rung]
    cause = f", because {'; '.join(reasons)}" if reasons else ""
    level = logging.INFO if rung is Rung.PACKED else logging.WARNING
    log.log(level, "model type '%s': %s%s", module.model.config.model_type, method, cause)


def check_values(module: RoleModule, sequences: list[torch.Tensor], expected: Expected, tolerance: Tolerance) -> None:
    """Compare `module` with the model's own forward, on each sequence alone and on all in one batch.

    Raises:
        UnfitError: they differ by more than the tolerance; the message names the comparison that failed.
    """
    targets, wanted = [sequence.roll(-1) for sequence in sequences], expected.values
    alone = [_computed(module, [sequence], target) for sequence, target in zip(sequences, targets, strict=True)]
    allowed = tolerance.allowed
    if not (error := tolerance.distance(alone, wanted)) <= allowed:
        raise UnfitError(f"a probe differs from transformers' by {error:.3g}, allowed are {allowed:.3g}")
    computed = _computed(module, sequences, torch.cat(targets))
    together = torch.split(computed, [len(sequence) for sequence in sequences])
    if not (error := tolerance.distance(together, wanted)) <= allowed:
        raise UnfitError(
            f"a probe gives other results in a batch than alone: they differ by {error:.3g}, allowed are {allowed:.3g}"
        )


def _check_masks(module: RoleModule, sequence: torch.Tensor) -> None:
    """Raise RunError if a layer asks for a mask that packed attention does not compute."""
    if module.context is not None:  # padding would be a second sequence, for which transformers makes another mask
        sequence = sequence[:1].repeat(2 * module.context.size)
    set_attention(module.model, CHECKED)
    kernel, module.kernel = module.kernel, ""
    try:
        _computed(module, [sequence], sequence.roll(-1))
    finally:
        set_attention(module.model, PACKED)
        module.kernel = kernel


def _leaking(module: RoleModule, sequences: list[torch.Tensor]) -> list[str]:
    """Return the names of the layers that pass a NaN of the middle sequence on to other sequences.

    Attention does not use a kernel here: a kernel may multiply masked values by 0, and 0 x NaN is NaN.

    Raises:
        UnfitError: other sequences become NaN, but not in a layer that maps packed tokens to packed tokens.
    """
    lengths = [len(sequence) for sequence in sequences]
    poisoned = torch.zeros(sum(lengths), dtype=torch.bool, device=sequences[0].device)
    poisoned[lengths[0] : lengths[0] + lengths[1]] = True
    kernel, module.kernel = module.kernel, ""
    own_poisoned = poisoned
    if module.context is not None:
        total = len(module.layout(lengths, poisoned.device).position_ids)
        own_poisoned = module.context.own(poisoned, total)
    try:
        with Leaks(module.model, own_poisoned) as leaks:
            values = _computed(module, sequences, torch.cat([sequence.roll(-1) for sequence in sequences]))
    finally:
        module.kernel = kernel
    is_finite = bool(torch.isfinite(values[~poisoned]).all())
    names = [name for name, _ in module.model.named_modules()]
    # Ranks that share sequences see different tokens leak, and all must take the same next step.
    is_mixed, *leak = each_on_any_rank([not is_finite, *(name in leaks.names for name in names)])
    if is_mixed:
        raise UnfitError("tokens of packed sequences mix in no layer that could compute them in rows")
    return [name for name, leaks_somewhere in zip(names, leak, strict=True) if leaks_somewhere]


def _check_causality(module: RoleModule, sequences: list[torch.Tensor], tolerance: Tolerance) -> None:
    """Raise UnfitError if a token's output changes with a later token: such a model is not causal.

    Both passes have the same sizes and round alike, so float32 uses a tenth of the tolerance. Every token counts, also
    in half precision.
    """
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    vocabulary = module.model.config.get_text_config().vocab_size
    changed = [torch.cat([sequence[:-1], (sequence[-1:] + 1) % vocabulary]) for sequence in sequences]
    values, values_changed = (_computed(module, ids, targets) for ids in (sequences, changed))
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0) - 1
    earlier = torch.ones_like(values, dtype=torch.bool)
    earlier[ends.to(values.device)] = False
    difference = float((values[earlier] - values_changed[earlier]).abs().nan_to_num(nan=torch.inf).max())
    if difference > tolerance.allowed / (10 if tolerance.is_exact else 1):
        raise UnfitError("its tokens see later ones: this engine trains causal language models")


def refuse_infinite_outputs(module: RoleModule, dtype: torch.dtype, expected: Expected) -> None:
    """Raise RunError if the model's own outputs are not finite; name a weight that is not finite, if there is one."""
    if all(torch.isfinite(values).all() for values in expected.values):
        return
    refuse_damaged_weights(module.model)
    raise RunError(
        f"outputs of model type '{module.model.config.model_type}' are not finite, although its weights are: the "
        f"model, or its adapter, overflows in {str(dtype).removeprefix('torch.')}",
        hints=["lower adapter.alpha, use other weights or another adapter, or set model.dtype to float32"],
    )


def tolerance_of(dtype: torch.dtype, expected: Expected) -> Tolerance:
    """Return the tolerance of values that are computed in `dtype`."""
    largest = max(float(values.abs().max()) for values in expected.values)
    return Tolerance(_TOLERANCE[dtype] * max(1.0, largest / _MODERATE), dtype is torch.float32)


def probes(module: RoleModule, device: torch.device) -> list[torch.Tensor]:
    """Return token ids of some short sequences, [T] int64 each."""
    config = module.model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    sizes = [min(length, longest) for length in _LENGTHS]
    return [torch.randint(config.vocab_size, (size,), generator=generator).to(device) for size in sizes]


def _values_of(module: RoleModule, sequences: list[torch.Tensor], results: torch.Tensor) -> list[torch.Tensor]:
    """Return values or log-probabilities [T] of each sequence, from the results of the model's own forward."""
    unpadded = [result[: len(sequence)] for result, sequence in zip(results, sequences, strict=True)]
    if module.head_name:
        return unpadded
    scores = [torch.log_softmax(logits / module.temperature, -1) for logits in unpadded]
    targets = [sequence.roll(-1)[:, None] for sequence in sequences]
    return [score.gather(1, target)[:, 0] for score, target in zip(scores, targets, strict=True)]


def _computed(module: RoleModule, sequences: Sequence[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """Return values or log-probabilities [T] of the sequences in one batch, computed by `module`."""
    lengths = [len(sequence) for sequence in sequences]
    layout = module.layout(lengths, targets.device)
    ids = torch.cat(list(sequences))
    name = "values" if module.head_name else "logprobs"
    outputs: dict[str, torch.Tensor] = module(ids, layout, targets, [name])
    return outputs[name]
