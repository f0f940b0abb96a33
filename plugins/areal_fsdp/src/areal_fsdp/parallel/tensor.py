"""Tensor parallelism: each rank has some heads of attention, some columns of the MLP, some words of the vocabulary.

Which matrix is split in which direction is the model's own plan (`base_model_tp_plan` of its config): `colwise` ones
give each rank a part of the output, `rowwise` ones take such a part, and their results are summed (Megatron-LM, arXiv
1909.08053). Between the two every rank works for itself; what enters such a block is the same on all.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_core.errors import RunError
from areal_fsdp.parallel.collectives import copied, group_name, joined, summed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)

_NUMBER = re.compile(r"\.\d+(?=\.|$)")
_WHOLE_WITH_PARTIAL_GRADIENT = "replicated_with_grad_allreduce"
"""Of a norm over heads: each rank has the whole weight, and the gradient of its own heads."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a parameter, while sharding has it gathered."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of a parameter, likewise; its gradient is the part's own, for all ranks go on alike."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Columns(torch.nn.Linear):
    """[.., in] to this rank's part of [.., out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, own_part(self.weight), None if self.bias is None else own_part(self.bias))


class _Rows(torch.nn.Linear):
    """This rank's part of [.., in] to [.., out]."""

    group: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = summed(F.linear(input, own_part(self.weight)), self.group)
        return output if self.bias is None else output + self.bias


class _Words(torch.nn.Embedding):
    """Token ids to whole embeddings, from a table of which each rank has some rows."""

    mesh: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = own_part(self.weight)
        first = self.mesh.get_local_rank() * len(rows)
        places = input - first
        inside = (places >= 0) & (places < len(rows))
        # The row of the padding token, which learns nothing, is one rank's.
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < len(rows) else None
        found = F.embedding(places.clamp(0, len(rows) - 1), rows, padding) * inside.unsqueeze(-1)
        return summed(found, group_name(self.mesh))


class _Logits(torch.nn.Linear):
    """Whole logits [1, T, vocabulary], for the model's own forward; the engine's has no use for them."""

    mesh: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = F.linear(input, own_part(self.weight), None if self.bias is None else own_part(self.bias))
        return joined(part[0].T, self.mesh).T[None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which words of the vocabulary a rank has.

    Attributes:
        mesh: of the ranks that have all of them together.
    """

    mesh: DeviceMesh

    def places(self, ids: torch.Tensor, words: int) -> torch.Tensor:
        """Where ids stand among the `words` of this rank; below 0 or beyond, where another one has them."""
        return ids - self.mesh.get_local_rank() * words

    def combine(
        self, normalizer: torch.Tensor, chosen: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """From what ranks know of their words to what holds of all.

        With L_r the logarithm of a rank's denominator and H_r the entropy among its words, L = log Σ exp L_r and, with
        p_r = exp(L_r - L), H = L - Σ p_r (L_r - H_r).

        Args:
            normalizer: [T] float32, L_r.
            chosen: [T], the chosen token's logit, 0 where another rank has it.
            entropy: [T], H_r, or None.

        Returns:
            Logarithm of the denominator, log-probability of the chosen token, entropy.
        """
        known = torch.stack([normalizer, chosen, *([] if entropy is None else [normalizer - entropy])])
        gathered = joined(known, self.mesh).view(self.mesh.size(), len(known), -1)
        whole = gathered[:, 0].logsumexp(0)
        logprobs = gathered[:, 1].sum(0) - whole
        if entropy is None:
            return whole, logprobs, None
        return whole, logprobs, whole - ((gathered[:, 0] - whole).exp() * gathered[:, 2]).sum(0)

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Of hidden states, over the words of all ranks."""
        return summed(gradient, group_name(self.mesh))


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that gives the last hidden states: all but its head."""
    body: torch.nn.Module = model.base_model
    return body if body is not model else getattr(model, "model", model)  # some name another part as their body


def text_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that gives the last hidden states of text: of a composite one its language model."""
    return body_of(model.get_decoder()) if _is_composite(model) else body_of(model)


def beside_text(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that text does not go through, such as a vision tower's, by name."""
    if not _is_composite(model):
        return {}
    used = {*text_of(model).parameters(), *model.get_output_embeddings().parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in used}


def _is_composite(model: PreTrainedModel) -> bool:
    """Whether a language model with a config of its own is a part of it; one that has a scalar head is none."""
    return model.config.get_text_config() is not model.config and model.get_output_embeddings() is not None


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the model's layers, which are sharded, compiled and checkpointed one by one.

    They are the outermost list of layers that transformers can checkpoint. Code from the hub may have none: there it is
    a list of as many modules as the config has layers.

    Raises:
        RunError: the model has neither.
    """
    count = model.config.get_text_config().num_hidden_layers
    body = body_of(model)
    decoder: torch.nn.Module = getattr(body, "language_model", body)  # else a vision tower's may be as many
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    checkpointed = (each for each in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in each))
    counted = (each for each in lists if len(each) == count)
    if (found := next(checkpointed, None) or next(counted, None)) is None:
        raise RunError(f"model type {model.config.model_type}: no list of its {count} decoder layers was found")
    return found


def divide_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> Vocabulary | None:
    """Split the embedding and the head, tied or not; None where the head has to stay whole on every rank."""
    words: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    for part, kind in ((words, torch.nn.Embedding), (head, torch.nn.Linear)):
        if part is not None and type(part) is not kind:  # such as one that scales what it finds
            raise _not_divided(model, f"has a {type(part).__name__} of its own")
    if words.num_embeddings % mesh.size():
        log.warning(
            "a vocabulary of %d does not divide by %d: each rank computes all of it", words.num_embeddings, mesh.size()
        )
        return None
    tied = head is not None and head.weight is words.weight
    words.__class__, words.mesh = _Words, mesh
    keep_part(words, "weight", 0, mesh)
    if head is None:
        return None
    head.__class__, head.mesh = _Logits, mesh
    if tied:
        head.weight = words.weight
    else:
        keep_part(head, "weight", 0, mesh)
    keep_part(head, "bias", 0, mesh)
    return Vocabulary(mesh)


def divide_layers(model: PreTrainedModel, layers: torch.nn.ModuleList, mesh: DeviceMesh) -> list[str]:
    """Split the matrices of every layer.

    Returns:
        Names (as of `model.named_parameters`) of parameters that are whole on every rank, each of which has a part of
        the gradient.

    Raises:
        RunError: the model has no plan, or one that asks for more than splitting matrices.
    """
    plan = _plan(model)
    inside = set(layers.modules())
    partial: list[str] = []
    prefix = f"{model.base_model_prefix}." if model.base_model is not model else ""
    for name, module in list(model.base_model.named_modules()):
        if module not in inside or not list(module.parameters(recurse=False)):
            continue
        style = plan.get(_NUMBER.sub(".*", name))
        if style == _WHOLE_WITH_PARTIAL_GRADIENT:
            partial += [f"{prefix}{name}.{own}" for own, _ in module.named_parameters(recurse=False)]
        elif style is not None:
            _divide(model, module, style, mesh)
    for block in _blocks(model, plan, inside):
        block.register_forward_pre_hook(_Copies(group_name(mesh)), with_kwargs=True)
    return partial


def _plan(model: PreTrainedModel) -> dict[str, str]:
    plan = getattr(model.config.get_text_config(), "base_model_tp_plan", None)
    if not plan:
        raise _not_divided(model, "has no plan for it in its config (base_model_tp_plan)")
    return dict(plan)


def _divide(model: PreTrainedModel, module: Any, style: str, mesh: DeviceMesh) -> None:
    if type(module) is not torch.nn.Linear or style not in ("colwise", "rowwise"):
        raise _not_divided(model, f"asks for '{style}' of {type(module).__name__} in its plan")
    is_column = style == "colwise"
    size = module.out_features if is_column else module.in_features
    if size % mesh.size():
        raise _not_divided(model, f"has {style} matrices of {size}, which {mesh.size()} does not divide")
    if is_column:
        module.__class__ = _Columns
        keep_part(module, "weight", 0, mesh)
        keep_part(module, "bias", 0, mesh)
    else:
        rows: Any = module
        rows.__class__, rows.group = _Rows, group_name(mesh)
        keep_part(module, "weight", 1, mesh)


def _not_divided(model: PreTrainedModel, why: str) -> RunError:
    return RunError(
        f"model type {model.config.model_type} {why}: this engine's tensor parallelism does not divide it",
        hints=["set train_engine.parallel.tensor to 1; context parallelism and more ranks work for every model"],
    )


def keep_part(module: torch.nn.Module, name: str, dimension: int, mesh: DeviceMesh) -> None:
    """Keep this rank's part of a parameter, where there is one, in memory of its own."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    part = whole.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous().clone()
    tensor = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
    setattr(module, name, torch.nn.Parameter(tensor, requires_grad=whole.requires_grad))


def _blocks(model: PreTrainedModel, plan: dict[str, str], inside: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """The modules whose input every rank uses a part of: the parents of matrices that are split by columns.

    Raises:
        RunError: one of them has a part without a plan, which would see the input whole.
    """
    for name, module in model.base_model.named_modules():
        kinds = {child: plan.get(_NUMBER.sub(".*", f"{name}.{child}")) for child, _ in module.named_children()}
        if module not in inside or "colwise" not in kinds.values():
            continue
        for child, part in module.named_children():
            if kinds[child] is None and any(True for _ in part.parameters()):
                raise _not_divided(model, f"has no place for {type(module).__name__}.{child} in its plan")
        yield module


@dataclass(frozen=True, slots=True)
class _Copies:
    """A hook before such a module: the gradients of its hidden states, its first input, are added up."""

    group: str

    def __call__(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (copied(inputs[0], self.group), *inputs[1:]), named
        return inputs, {**named, "hidden_states": copied(named["hidden_states"], self.group)}
