"""Checks at setup, on a few tokens, that this engine computes what transformers computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from areal_core.errors import RunError
from areal_fsdp.parallel.loading import refuse_damaged_weights
from areal_fsdp.parallel.ranks import fail_together, rank_and_ranks
from areal_fsdp.parallel.tensor import decoder_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from areal_fsdp.models.model import RoleModule
    from areal_fsdp.parallel.loading import ModelFiles

_LENGTHS = (9, 5, 2)
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}
"""How far two log-probabilities of the same token may lie apart, where none is below `-_MODERATE`."""
_MODERATE = 10.0
"""Beyond it the tolerance grows with the largest log-probability: rounding is off by a share of a logit, and pretrained
models give the probe's random tokens log-probabilities of -20 and less, from logits above 30."""


def own_outputs(module: RoleModule, device: torch.device, *, at_once: bool = False) -> list[torch.Tensor]:
    """What the model's own forward makes of each probe: one by one, or of all in one batch, padded on the right."""
    sequences = _probes(module, device)
    batches = [sequences] if at_once else [[sequence] for sequence in sequences]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        return [values for batch in batches for values in _wanted(module, batch)]


def outputs_before_division(module: RoleModule, files: ModelFiles | None) -> list[torch.Tensor]:
    """`own_outputs` of a model that ranks are about to divide; collective.

    A model that is still in its files runs through rank 0, layer by layer, and in one pass: files are read once.
    """
    device = torch.device("cpu")
    if files is None:
        return own_outputs(module, device)
    lengths = [len(sequence) for sequence in _probes(module, device)]
    found, failure = torch.zeros(sum(lengths)), None
    if rank_and_ranks()[0] == 0:
        try:
            with files.streamed(module.model, decoder_layers(module.model)):
                found = torch.cat(own_outputs(module, device, at_once=True))
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks wait in the next line
            failure = error
    fail_together(failure, f"computing a probe with the undivided model type '{module.model.config.model_type}'")
    dist.broadcast(found, 0)
    return list(torch.split(found, lengths))


@torch.no_grad()
def check_module(
    module: RoleModule, device: torch.device, dtype: torch.dtype, wanted: list[torch.Tensor] | None = None
) -> None:
    """Compare `module` with the model's own forward, first on one sequence, then on several packed ones.

    Args:
        module: on the device.
        device: where it computes.
        dtype: in which.
        wanted: what `outputs_before_division` said before ranks divided the model; None where they have not.

    Raises:
        RunError: they differ, or are not finite; it names the model type and says which of the two comparisons failed.
    """
    config = module.model.config.get_text_config()
    if getattr(config, "final_logit_softcapping", None):  # on a model whose logits are small yet, no probe would see it
        raise _changed_logits(config.model_type, f"it caps them at {config.final_logit_softcapping}")
    sequences = _probes(module, device)
    targets = [sequence.roll(-1) for sequence in sequences]
    pairs = list(zip(sequences, targets, strict=True))
    wanted = own_outputs(module, device) if wanted is None else [values.to(device) for values in wanted]
    with torch.compiler.set_stance("force_eager"):  # a compiler tunes its code for the sizes of the first call
        alone = torch.cat([_computed(module, [sequence], target) for sequence, target in pairs])
        packed = _computed(module, sequences, torch.cat(targets))
    kind, expected = module.model.config.model_type, torch.cat(wanted)
    allowed = _TOLERANCE[dtype] * max(1.0, float(expected.abs().max()) / _MODERATE)
    if not (torch.isfinite(alone).all() and torch.isfinite(expected).all()):
        refuse_damaged_weights(module.model)
        raise RunError(
            f"a probe of model type '{kind}' is not finite, and all of its weights are: the model, or its adapter, "
            f"overflows in {str(dtype).removeprefix('torch.')}",
            hints=["lower adapter.alpha, or take other weights or another adapter; see also model.dtype"],
        )
    if not (error := _distance(alone, expected)) <= allowed:
        raise _changed_logits(kind, f"a probe differs by {error:.3g}, allowed are {allowed:.3g}")
    if not (error := _distance(packed, expected)) <= allowed:
        raise RunError(
            f"model type '{kind}' gives other results for packed sequences than one by one: on a probe they differ by "
            f"{error:.3g}, at most {allowed:.3g} is allowed",
            hints=["its layers mix tokens outside attention; training here needs a model that does not"],
        )


def _probes(module: RoleModule, device: torch.device) -> list[torch.Tensor]:
    """Token ids of some short sequences."""
    config = module.model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    generator = torch.Generator().manual_seed(0)
    sizes = [min(length, longest) for length in _LENGTHS]
    return [torch.randint(config.vocab_size, (size,), generator=generator).to(device) for size in sizes]


def _changed_logits(kind: str, how: str) -> RunError:
    return RunError(
        f"model type '{kind}' changes its logits or hidden states in a way that this engine does not reproduce: {how}",
        hints=["soft-capped, scaled or shifted logits are not supported; choose a model without them"],
    )


def _wanted(module: RoleModule, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    results = module.unpacked(pad_sequence(sequences, batch_first=True))
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


def _distance(computed: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference; NaN counts as infinitely far."""
    return float((computed - wanted).abs().nan_to_num(nan=torch.inf).max())
