"""Tensor parallelism: each rank has some heads of attention, some columns of the MLP, some words of the vocabulary.

The model's own plan (`base_model_tp_plan` of its config) says how each matrix is split. A `colwise` matrix gives each
rank a part of the output. A `rowwise` matrix takes such a part, and the ranks' results are summed (Megatron-LM, arXiv
1909.08053). Between the two, the ranks do not communicate. The input of a colwise matrix is the same on all ranks.
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
"""Style of a norm over heads: each rank has the whole weight, and the gradient of only its own heads."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor; a plain tensor is returned unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the parts of all ranks as one tensor.

    The backward pass gives each rank the gradient of its part, without a sum: the ranks use the result in the same way.
    """
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class _Columns(torch.nn.Linear):
    """Maps [.., in] to this rank's part of [.., out]."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.linear(input, own_part(self.weight), None if self.bias is None else own_part(self.bias))


class _Rows(torch.nn.Linear):
    """Maps this rank's part of [.., in] to [.., out]."""

    group: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = summed(F.linear(input, own_part(self.weight)), self.group)
        return output if self.bias is None else output + self.bias


class _Words(torch.nn.Embedding):
    """Maps token ids to whole embeddings. Each rank has some rows of the table."""

    mesh: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = own_part(self.weight)
        first = self.mesh.get_local_rank() * len(rows)
        indices = input - first
        inside = (indices >= 0) & (indices < len(rows))
        # One rank has the row of the padding token, which gets no gradient.
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < len(rows) else None
        embeddings = F.embedding(indices.clamp(0, len(rows) - 1), rows, padding) * inside.unsqueeze(-1)
        return summed(embeddings, group_name(self.mesh))


class _Logits(torch.nn.Linear):
    """Computes whole logits [1, T, vocabulary] for the model's own forward, which the engine itself does not use."""

    mesh: DeviceMesh

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        part = F.linear(input, own_part(self.weight), None if self.bias is None else own_part(self.bias))
        return joined(part[0].T, self.mesh).T[None]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A vocabulary that is split over ranks.

    Attributes:
        mesh: the tensor-parallel group.
    """

    mesh: DeviceMesh

    def local_ids(self, ids: torch.Tensor, words: int) -> torch.Tensor:
        """Return the indices of ids among this rank's `words`; ids of other ranks are outside [0, words)."""
        return ids - self.mesh.get_local_rank() * words

    def combine(
        self, normalizer: torch.Tensor, chosen: torch.Tensor, entropy: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Combine the ranks' results for their words to those for the whole vocabulary; collective.

        With L_r the logarithm of rank r's softmax denominator and H_r the entropy over its words, L = log Σ exp L_r
        and, with p_r = exp(L_r - L), H = L - Σ p_r (L_r - H_r).

        Args:
            normalizer: [T] float32, L_r.
            chosen: [T, N] float32, the logits of N chosen tokens, 0 for those that another rank has.
            entropy: [T] float32, H_r, or None.

        Returns:
            Logarithm of the denominator [T], log-probabilities of the chosen tokens [T, N], and entropy [T] or None;
            float32.
        """
        count = chosen.shape[1]
        local = torch.stack([normalizer, *chosen.T, *([] if entropy is None else [normalizer - entropy])])
        gathered = joined(local, self.mesh).view(self.mesh.size(), len(local), -1)
        whole = gathered[:, 0].logsumexp(0)
        logprobs = gathered[:, 1 : 1 + count].sum(0).T - whole[:, None]
        if entropy is None:
            return whole, logprobs, None
        return whole, logprobs, whole - ((gathered[:, 0] - whole).exp() * gathered[:, -1]).sum(0)

    def sum(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the sum of a gradient of hidden states over the words of all ranks; collective."""
        return summed(gradient, group_name(self.mesh))


def body_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that computes the last hidden states: everything except its head."""
    body: torch.nn.Module = model.base_model
    return body if body is not model else getattr(model, "model", model)  # base_model_prefix may name no attribute


def text_of(model: PreTrainedModel) -> torch.nn.Module:
    """Return the part of a model that computes the last hidden states of text: a composite model's language model."""
    return body_of(model.get_decoder()) if _is_composite(model) else body_of(model)


def beside_text(model: PreTrainedModel) -> dict[str, torch.nn.Parameter]:
    """Return the parameters that text does not use, such as a vision tower's, by name."""
    if not _is_composite(model):
        return {}
    used = {*text_of(model).parameters(), *model.get_output_embeddings().parameters()}
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in used}


def _is_composite(model: PreTrainedModel) -> bool:
    """Return True if a language model with its own config is a part of the model; False with a scalar head."""
    return model.config.get_text_config() is not model.config and model.get_output_embeddings() is not None


def decoder_layers(model: PreTrainedModel) -> torch.nn.ModuleList:
    """Return the model's layers, which are sharded, compiled and checkpointed one by one.

    They are the outermost list of layers that transformers can checkpoint. A model without such layers, as in code from
    the hub, has a list of as many modules as its config has layers.

    Raises:
        RunError: the model has neither list.
    """
    count = model.config.get_text_config().num_hidden_layers
    body = body_of(model)
    decoder: torch.nn.Module = getattr(body, "language_model", body)  # a vision tower may have as many layers
    lists = [module for module in decoder.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    checkpointed = (part for part in lists if all(isinstance(x, GradientCheckpointingLayer) for x in part))
    counted = (part for part in lists if len(part) == count)
    if (layers := next(checkpointed, None) or next(counted, None)) is None:
        raise RunError(f"model type {model.config.model_type}: no list of its {count} decoder layers was found")
    return layers


def divide_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> Vocabulary | None:
    """Split the embedding and the head, tied or not, over the ranks of a mesh.

    Returns:
        None if the head stays whole on every rank: a scalar head, or a vocabulary that the ranks do not divide.

    Raises:
        RunError: the embedding or the head computes more than the module it is derived from.
    """
    words: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    for part, kind in ((words, torch.nn.Embedding), (head, torch.nn.Linear)):
        if part is not None and type(part) is not kind:  # such as an embedding that scales its result
            raise _not_divided(model, f"has a {type(part).__name__} of its own")
    if words.num_embeddings % mesh.size():
        log.warning(
            "parallel.tensor %d does not divide the vocabulary of %d: each rank computes all of it",
            mesh.size(),
            words.num_embeddings,
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
    """Split the matrices of every layer over the ranks of a mesh.

    Returns:
        Names, as in `model.named_parameters`, of the parameters that every rank has whole, with a part of the gradient:
        the caller must sum their gradients.

    Raises:
        RunError: the model has no plan, or a plan with other styles than `colwise` and `rowwise`.
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
            partial += [f"{prefix}{name}.{attribute}" for attribute, _ in module.named_parameters(recurse=False)]
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


def _not_divided(model: PreTrainedModel, reason: str) -> RunError:
    return RunError(
        f"model type {model.config.model_type} {reason}: this engine's tensor parallelism does not divide it",
        hints=["set train_engine.parallel.tensor to 1; context parallelism and more ranks work for every model"],
    )


def keep_part(module: torch.nn.Module, name: str, dimension: int, mesh: DeviceMesh) -> None:
    """Replace a parameter by this rank's part of it, in memory of its own; do nothing if the parameter is None."""
    whole = getattr(module, name, None)
    if whole is None:
        return
    part = whole.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].contiguous().clone()
    tensor = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
    setattr(module, name, torch.nn.Parameter(tensor, requires_grad=whole.requires_grad))


def _blocks(model: PreTrainedModel, plan: dict[str, str], inside: set[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    """Yield the parents of colwise matrices: the gradient of their input must be summed over the ranks.

    Raises:
        RunError: such a module has a child with parameters but without a style: its gradient would be summed too.
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
    """A forward pre-hook that sums the gradients of a module's hidden states, its first input, over the ranks."""

    group: str

    def __call__(
        self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if inputs:
            return (copied(inputs[0], self.group), *inputs[1:]), named
        return inputs, {**named, "hidden_states": copied(named["hidden_states"], self.group)}
