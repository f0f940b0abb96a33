"""Checks at setup, on a few tokens, that this engine computes what transformers computes; and chooses how it does.

The ways that a model can compute a batch are the rungs of a ladder, from the fastest down:

    packed      one sequence behind another, with packed attention; other layers see where sequences begin
    mixers      the same, with a padded row for each sequence around the layers that mix tokens outside attention
    rows        a padded row for each sequence in the whole model, with transformers' own masks and attention

A model takes the first rung on which it computes what it computes of each sequence alone, and is refused where no rung
does. Three kinds of faults would pass a comparison of short sequences, so each has a check of its own: masks that look
like causal ones at first (`CHECKED`), layers whose memory fades (`Leaks`), and logits far below their cap
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
"""A layer's inputs and outputs are taken for packed tokens by their number, 17, which is no usual width."""
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}
"""How far two log-probabilities of the same token may lie apart, where none is below `-_MODERATE`; see `Tolerance`."""
_MODERATE = 10.0
"""Beyond it the tolerance grows with the largest log-probability: rounding is off by a share of a logit, and pretrained
models give the probe's random tokens log-probabilities of -20 and less, from logits above 30."""


class Rung(StrEnum):
    """How a model computes a batch; see above."""

    PACKED = "packed"
    MIXERS = "mixers"
    ROWS = "rows"


class Choice(NamedTuple):
    """A rung and why it is no higher one.

    Attributes:
        rung: that the model takes.
        reasons: for each rung above it, the fault of the model there.
    """

    rung: Rung
    reasons: list[str]


class Expected(NamedTuple):
    """What the model's own forward makes of the probes.

    Attributes:
        values: [T] float32 of each probe: log-probabilities, or values of a scalar head.
        final: what the model does to its logits.
    """

    values: list[torch.Tensor]
    final: FinalLogits


class Tolerance(NamedTuple):
    """How far values may lie from the expected ones: by rounding, which grows with the values.

    In half precision only half of each sequence's tokens have to lie within it. Rounding turns choices of routers over,
    and another expert moves a token by any amount.

    Attributes:
        allowed: the distance.
        is_exact: whether every token has to be within it.
    """

    allowed: float
    is_exact: bool

    def distance(self, computed: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
        """Return the largest difference, or in half precision the largest median of a sequence; NaN is infinitely far.

        Args:
            computed: [T] of each sequence.
            wanted: the same.
        """
        pairs = zip(computed, wanted, strict=True)
        apart = [(mine - right).abs().nan_to_num(nan=torch.inf) for mine, right in pairs]
        is_exact = self.is_exact or not all(bool(torch.isfinite(each).all()) for each in apart)
        return max(float(each.max() if is_exact else each.median()) for each in apart)


class UnfitError(Exception):
    """A rung does not compute what the model computes; the message is the reason."""


def expected_outputs(module: RoleModule, device: torch.device, *, together: bool = False) -> Expected:
    """Compute each probe by the model's own forward: one by one, or all in one batch, padded on the right.

    Raises:
        RunError: transformers cannot compute the model, or it changes its logits in a way that is not known.
    """
    sequences = probes(module, device)
    batches = [sequences] if together else [[sequence] for sequence in sequences]
    values, final = list[torch.Tensor](), FinalLogits()
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            for batch in batches:
                results, final = module.unpacked(pad_sequence(batch, batch_first=True))
                values += _own_values(module, batch, results)
    except (RunError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise RunError(
            f"transformers' own forward of model type '{module.model.config.model_type}' fails on {sum(_LENGTHS)} "
            f"tokens: {_words(error)}",
            hints=[
                "check that its config.json fits its weights, and that the libraries it needs are installed",
                "if the error is of dtypes, set model.dtype to float32: some models compute in no other",
            ],
        ) from error
    return Expected(values, final)


def expected_before_division(module: RoleModule, files: ModelFiles | None) -> Expected:
    """`expected_outputs` of a model that ranks are about to divide; collective.

    A model that is still in its files runs through rank 0, layer by layer, and in one pass: files are read once.
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
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
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
    """Find the first rung on which `module` computes what the model's own forward does, and leave the module on it.

    All ranks take the same one; collective.

    Args:
        module: on the device.
        device: where it computes.
        dtype: in which.
        expected: what `expected_before_division` gave before ranks divided the model; None where they have not.
        only_packed: the setting by which ranks divide tokens or heads, for which the other rungs are not made.

    Raises:
        RunError: no rung does; it names the model type and the fault on each. Or the model's outputs are not finite.
    """
    kind = module.model.config.model_type
    expected = expected_outputs(module, device) if expected is None else expected
    module.final = expected.final
    expected = expected._replace(values=[values.to(device) for values in expected.values])
    refuse_what_is_not_finite(module, dtype, expected)
    if module.rotary and only_packed:
        raise RunError(
            f"model type '{kind}' chooses the frequencies of its rotary embedding by the length of a sequence, and "
            f"ranks of {only_packed} do not know it",
            hints=[f"set {only_packed} to 1"],
        )
    tolerance = tolerance_of(dtype, expected)
    reasons: list[str] = []
    with torch.compiler.set_stance("force_eager"):  # a compiler tunes its code for the sizes of the first call
        for rung, attempt in _attempts(module, device, expected, tolerance):
            if rung is not Rung.PACKED and only_packed:
                raise RunError(
                    f"model type '{kind}' cannot be packed, and {only_packed} is made for packed models alone: "
                    + "; ".join(reasons),
                    hints=[f"set {only_packed} to 1; more ranks, and parallel.expert, work with it"],
                )
            if not (reason := _fault(attempt)):
                _report(module, rung, reasons)
                return Choice(rung, reasons)
            reasons.append(f"{rung}: {reason}")
    raise RunError(
        f"this engine does not compute what transformers computes for model type '{kind}': " + "; ".join(reasons),
        hints=["choose another model; docs/reference/models.md lists those that were tried"],
    )


def _attempts(
    module: RoleModule, device: torch.device, expected: Expected, tolerance: Tolerance
) -> Iterator[tuple[Rung, Callable[[], None]]]:
    """The rungs in their order, each with what raises an error where the model does not fit; one is tried at a time."""
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
                raise UnfitError("rows have no images, and this model sees some")
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


def _fault(attempt: Callable[[], None]) -> str:
    """Return the reason for which an attempt fails on any rank; empty where it succeeds on all."""
    reason = ""
    try:
        attempt()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a model may raise anything; it is reported, and the next rung is tried
        reason = _words(error)
    has_failed = on_any_rank(bool(reason))
    return reason or ("it fails on another rank" if has_failed else "")


def _words(error: Exception) -> str:
    """Return the first sentence of an error, with its type where the type is not ours."""
    first = (str(error).splitlines() or [""])[0].split(". ")[0]
    return first if isinstance(error, RunError | UnfitError) else f"{type(error).__name__}: {first}"


def _report(module: RoleModule, rung: Rung, reasons: list[str]) -> None:
    if rank_and_ranks()[0]:
        return
    how = {
        Rung.PACKED: "its sequences are packed",
        Rung.MIXERS: f"its sequences are packed, and {len(module.mixers.names)} mixers compute them in rows",
        Rung.ROWS: f"each sequence is a padded row, with attention '{module.attention}'",
    }[rung]
    why = f", because {'; '.join(reasons)}" if reasons else ""
    log.log(logging.INFO if rung is Rung.PACKED else logging.WARNING, "model type '%s': %s%s", _kind(module), how, why)


def _kind(module: RoleModule) -> str:
    kind: str = module.model.config.model_type
    return kind


def check_values(module: RoleModule, sequences: list[torch.Tensor], expected: Expected, tolerance: Tolerance) -> None:
    """Compare `module` with the model's own forward, on each sequence alone and on all in one batch.

    Raises:
        UnfitError: they differ by more than is allowed; the message says which of the two comparisons failed.
    """
    targets, wanted = [sequence.roll(-1) for sequence in sequences], expected.values
    alone = [_computed(module, [one], target) for one, target in zip(sequences, targets, strict=True)]
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
    """Raise RunError where a layer asks for another mask than packed attention computes."""
    if module.context is not None:  # no token fills the sequence up: transformers would take it for a second one
        sequence = sequence[:1].repeat(2 * module.context.size)
    set_attention(module.model, CHECKED)
    kernel, module.kernel = module.kernel, ""
    try:
        _computed(module, [sequence], sequence.roll(-1))
    finally:
        set_attention(module.model, PACKED)
        module.kernel = kernel


def _leaking(module: RoleModule, sequences: list[torch.Tensor]) -> list[str]:
    """The layers that pass a NaN of the middle sequence on to others; empty where none does.

    Attention is PyTorch's here, sequence by sequence: a kernel may multiply what it masks by 0, which is NaN of NaN.

    Raises:
        UnfitError: tokens of others become NaN, and no layer does it that takes and gives packed tokens.
    """
    lengths = [len(sequence) for sequence in sequences]
    poisoned = torch.zeros(sum(lengths), dtype=torch.bool, device=sequences[0].device)
    poisoned[lengths[0] : lengths[0] + lengths[1]] = True
    kernel, module.kernel = module.kernel, ""
    own = poisoned
    if module.context is not None:
        total = len(module.layout(lengths, poisoned.device).position_ids)
        own = module.context.own(poisoned, total)
    try:
        with Leaks(module.model, own) as leaks:
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
    """Raise where a token's output changes with a later token: such a model is no language model, nor can it be padded.

    The sizes of both passes are the same, so that they round alike: in float32 a tenth of the tolerance is enough.
    Every token counts, in half precision too.
    """
    targets = torch.cat([sequence.roll(-1) for sequence in sequences])
    vocabulary = module.model.config.get_text_config().vocab_size
    changed = [torch.cat([one[:-1], (one[-1:] + 1) % vocabulary]) for one in sequences]
    seen, others = (_computed(module, ids, targets) for ids in (sequences, changed))
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0) - 1
    earlier = torch.ones_like(seen, dtype=torch.bool)
    earlier[ends.to(seen.device)] = False
    apart = float((seen[earlier] - others[earlier]).abs().nan_to_num(nan=torch.inf).max())
    if apart > tolerance.allowed / (10 if tolerance.is_exact else 1):
        raise UnfitError("its tokens see later ones: this engine trains causal language models")


def refuse_what_is_not_finite(module: RoleModule, dtype: torch.dtype, expected: Expected) -> None:
    """Raise RunError where the model's own outputs are not finite, and name the weight that is not, if one is."""
    if all(torch.isfinite(values).all() for values in expected.values):
        return
    refuse_damaged_weights(module.model)
    raise RunError(
        f"a probe of model type '{module.model.config.model_type}' is not finite, and all of its weights are: the "
        f"model, or its adapter, overflows in {str(dtype).removeprefix('torch.')}",
        hints=["lower adapter.alpha, or take other weights or another adapter; see also model.dtype"],
    )


def tolerance_of(dtype: torch.dtype, expected: Expected) -> Tolerance:
    """Return how far values computed in `dtype` may lie from the expected ones."""
    largest = max(float(values.abs().max()) for values in expected.values)
    return Tolerance(_TOLERANCE[dtype] * max(1.0, largest / _MODERATE), dtype is torch.float32)


def probes(module: RoleModule, device: torch.device) -> list[torch.Tensor]:
    """Token ids of some short sequences."""
    config = module.model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    sizes = [min(length, longest) for length in _LENGTHS]
    return [torch.randint(config.vocab_size, (size,), generator=generator).to(device) for size in sizes]


def _own_values(module: RoleModule, sequences: list[torch.Tensor], results: torch.Tensor) -> list[torch.Tensor]:
    own = [result[: len(sequence)] for result, sequence in zip(results, sequences, strict=True)]
    if module.head_name:
        return own
    scores = [torch.log_softmax(logits / module.temperature, -1) for logits in own]
    targets = [sequence.roll(-1)[:, None] for sequence in sequences]
    return [score.gather(1, target)[:, 0] for score, target in zip(scores, targets, strict=True)]


def _computed(module: RoleModule, sequences: Sequence[torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    lengths = [len(sequence) for sequence in sequences]
    layout = module.layout(lengths, targets.device)
    ids = torch.cat(list(sequences))
    name = "values" if module.head_name else "logprobs"
    outputs: dict[str, torch.Tensor] = module(ids, layout, targets, [name])
    return outputs[name]
