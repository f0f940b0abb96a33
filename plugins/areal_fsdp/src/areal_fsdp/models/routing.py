"""What an MoE's routers do in training: how evenly they use their experts, the loss that keeps it so, and replay.

The loss is that of Switch Transformer (arXiv 2101.03961, eq. 4), E x sum f_i P_i over the E experts of a layer, with
f_i the share of the choices that went to expert i and P_i its mean probability, added up over layers. f and P are those
of a sequence, not of whatever a rank has at once (the sequence-wise balance of DeepSeek-V3, arXiv 2412.19437, eq. 17 to
20), so that its gradient is the same however an update is packed and split; sequences count by their tokens. At 1 a
layer is even.

Replay (R3, arXiv 2510.11370): where it is known which experts generated a token, it goes through these, each
weighted by this model's own probability of it, so that gradients flow to the router as they do without. The choices
that f counts are then those.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from areal_core.data import Metric
from areal_core.errors import RunError
from areal_core.models import ROUTED_EXPERTS
from areal_fsdp.models.compiling import mark_dynamic
from areal_fsdp.parallel.ranks import rank_and_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import PreTrainedModel

    from areal_core.data import PackedBatch
    from areal_core.sdk import Role
    from areal_fsdp.attention.hugging_face import Layout
    from areal_fsdp.parallel.context import Context


ROUTERS = {
    "FlexOlmoTopKRouter",
    "GptOssTopKRouter",
    "MiniMaxTopKRouter",
    "MixtralTopKRouter",
    "OlmoeTopKRouter",
    "Qwen2MoeTopKRouter",
    "Qwen3MoeTopKRouter",
    "Qwen3NextTopKRouter",
    "Qwen3_5MoeTopKRouter",
}
"""Routers whose probabilities are a softmax of logits, and which give logits, scores and choices, in this order. Others
compute as they do in transformers: they have no metrics, and a loss or choices for them are refused."""


def choices_of(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """The column of a batch that says which experts its tokens went through, where it has it."""
    return {ROUTED_EXPERTS: batch[ROUTED_EXPERTS]} if ROUTED_EXPERTS in batch else {}


def _choices(batch: PackedBatch, role: Role) -> torch.Tensor | None:
    """[T, layers, choices], those of the policy: a role that generates nothing has none."""
    return batch.get(ROUTED_EXPERTS) if role.trains and role.head == "vocabulary" else None


class Routing:
    """What all routers of a model share.

    Args:
        model: an MoE, or any other model, of which nothing is watched.
        weight: of the loss, 0 for none.

    Raises:
        RunError: a loss is asked for, and the model has no routers that are known.
    """

    def __init__(self, model: PreTrainedModel, weight: float) -> None:
        self._weight = weight
        self.is_watched = False
        self._knows_sequences = True
        self.sequence = self.sizes = self.share = torch.zeros(0)
        self._routers: list[Any] = []
        recorder: Any = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
        kind = getattr(recorder, "target_class", None)
        module: Any
        for module in model.modules():
            if kind is not None and type(module) is kind and kind.__name__ in ROUTERS:
                watched: Any = _watched_class
                module.__class__ = watched(kind)
                module.routing, module.replayed = self, None
                empty = torch.zeros(module.num_experts + 5)
                module.register_buffer("found", empty, persistent=False)
                self._routers.append(module)
        if weight and not self._routers:
            raise RunError(
                f"router_loss is {weight}, and model type {model.config.model_type} has no routers that are known",
                hints=["set train_engine.router_loss to 0"],
            )

    def check(self, batch: PackedBatch, role: Role) -> None:
        """Raise RunError where the choices of a batch, which is on the CPU, cannot be those of this model."""
        if (experts := _choices(batch, role)) is None or not len(experts):
            return
        routers = self._routers
        here = [len(routers), routers[0].top_k, routers[0].num_experts] if routers else [0, 0, 0]
        there = [*experts.shape[1:], int(experts.max())]
        if there[:2] != here[:2] or there[2] > here[2]:
            raise RunError(
                f"the batch has {there[1]} choices in each of {there[0]} layers, up to expert {there[2]}; the model "
                f"has {here[1]} in {here[0]}, of {here[2]} experts",
                hints=["generate with the model that is trained, or set inference_engine.routed_experts to false"],
            )

    def replay(self, part: PackedBatch | None, role: Role, layout: Layout, context: Context | None) -> None:
        """Have what is computed next go through the experts that it was generated by.

        Args:
            part: on the device; None, or one without choices, routes by itself.
            role: of the model; any but the policy's own, such as the reference, routes by itself.
            layout: of the part, with what fills it up.
            context: where this rank has a share of its tokens.
        """
        chosen: Iterable[torch.Tensor | None] = repeat(None)
        if part is not None and (experts := _choices(part, role)) is not None:
            total = len(layout.position_ids)
            experts = layout.computed(F.pad(experts, (0, 0, 0, 0, 0, total - len(experts))), filling=0)
            experts = experts if context is None else context.own(experts, total)
            chosen = experts.unbind(1)
        for router, own in zip(self._routers, chosen, strict=False):
            # Each a tensor of its own: to a compiler layers with views at different places are not alike.
            router.replayed = None if own is None else own.clone(memory_format=torch.contiguous_format)
            if own is not None:
                mark_dynamic(router.replayed, 0)

    def watch(
        self, lengths: torch.Tensor, layout: Layout, total: int, context: Context | None, *, counts: bool
    ) -> None:
        """Count the routers' choices, and compute their loss, in the forward passes until `rest`.

        Args:
            lengths: [B] int64 on the device, lengths of the sequences of a micro-batch.
            layout: layout of the micro-batch, with its filling.
            total: tokens of the update, on all ranks.
            context: set if this rank has a share of each sequence; then the balance of whole sequences is not known.
            counts: whether the micro-batch counts; one that only takes part in other ranks' collectives does not.
        """
        if not self._routers:
            return
        tokens = len(layout.position_ids)
        lengths = lengths * counts  # all tokens of a micro-batch that does not count are filling
        places = torch.arange(len(lengths) + 1, device=lengths.device)
        filling = (tokens - lengths.sum()).unsqueeze(0)
        self.sequence = places.repeat_interleave(torch.cat([lengths, filling]), output_size=tokens)
        self.sequence = layout.computed(self.sequence, filling=len(lengths))
        if context is not None:
            self._knows_sequences = False
            self.sequence = context.own(self.sequence, tokens)
        self.sizes = torch.zeros_like(places).index_add(0, self.sequence, torch.ones_like(self.sequence)).float()
        self.share = torch.full((), self._weight / total, device=lengths.device)
        mark_dynamic(self.sequence, 0)
        mark_dynamic(self.sizes, 0)
        self.is_watched = True

    def rest(self) -> None:
        """Stop counting."""
        self.is_watched = False

    def metrics(self) -> Mapping[str, Metric]:
        """Return metrics of all choices on all ranks since the last call; collective. Empty without routers."""
        if not self._routers:
            return {}
        found = torch.stack([router.found for router in self._routers])
        for router in self._routers:
            router.found.zero_()
        if rank_and_ranks()[1] > 1:
            dist.all_reduce(found)
        counts, (entropy, loss, tokens, replayed, differing) = found[:, :-5], found[:, -5:].T
        loads = counts.amax(1) * counts.shape[1] / counts.sum(1).clamp(min=1)
        values = {
            "router_load": float(loads.mean()),
            "router_load_max": float(loads.max()),
            "router_entropy": float((entropy / tokens.clamp(min=1)).mean()) / math.log(max(2, counts.shape[1])),
            "router_balance": float((loss / tokens.clamp(min=1)).mean()),
        }
        if replayed.sum():
            values["router_disagreement"] = float(differing.sum() / replayed.sum())
        if not self._knows_sequences:
            del values["router_balance"]
        return {name: Metric.mean(value) for name, value in values.items()}


class _WithLoss(torch.autograd.Function):
    """The scores as they are; a loss beside them gets the gradient 1."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


@cache
def _watched_class(kind: Any) -> Any:
    """A router of some kind, which gives logits [T, E], scores [T, K] and choices [T, K].

    One class for all layers: a compiler makes a graph for each class that it meets.
    """

    class Watched(kind):
        routing: Routing
        found: torch.Tensor
        replayed: torch.Tensor | None

        def forward(self, hidden: torch.Tensor) -> Any:
            logits, scores, own = super().forward(hidden)
            chosen, routing = own, self.routing
            if self.replayed is not None:
                chosen = torch.where(self.replayed > 0, self.replayed.long() - 1, own)
                scores = _scores(self, logits, chosen).to(scores.dtype)
            if not routing.is_watched:
                return logits, scores, chosen
            chance = torch.softmax(logits.float(), -1)
            picked = torch.zeros_like(chance).scatter(1, chosen, 1.0)
            whole = routing.sizes.new_zeros(len(routing.sizes), picked.shape[1]).index_add(0, routing.sequence, picked)
            share = whole / (routing.sizes * chosen.shape[1]).clamp(min=1).unsqueeze(-1)
            counted = (routing.sequence < len(routing.sizes) - 1).float()
            losses = picked.shape[1] * (share[routing.sequence] * chance).sum(-1) * counted
            with torch.no_grad():
                entropy = -(chance * torch.log(chance.clamp(min=1e-30))).sum(-1)
                sums = [
                    (entropy * counted).sum(),
                    losses.sum(),
                    counted.sum(),
                    *_differences(self.replayed, own, picked, counted),
                ]
                self.found.add_(torch.cat([(picked * counted.unsqueeze(-1)).sum(0), torch.stack(sums)]))
            scores = _WithLoss.apply(scores, losses.sum() * routing.share)  # type: ignore[no-untyped-call]
            return logits, scores, chosen

    Watched.__name__ = kind.__name__  # for messages that name a model's modules
    return Watched


def _scores(router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """[T, K] float32: the weights of these experts [T, K], as the routers of `ROUTERS` compute those of their own."""
    chances = torch.softmax(logits.float(), -1).gather(1, chosen)
    norms = getattr(router, "norm_topk_prob", True)  # routers without the setting always do
    return chances / chances.sum(-1, keepdim=True) if norms else chances


def _differences(
    replayed: torch.Tensor | None, own: torch.Tensor, picked: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many choices were replayed; and how many of these are none that the router would have made by itself.

    Args:
        replayed: [T, K], 0 where none was.
        own: [T, K], the router's.
        picked: [T, E] float32, 1 where an expert is gone through.
        counted: [T] float32, 0 of tokens that do not count.
    """
    if replayed is None:
        return picked.new_zeros(()), picked.new_zeros(())
    is_replayed = (replayed > 0) * counted.unsqueeze(-1)
    return is_replayed.sum(), (is_replayed * (1 - picked.gather(1, own))).sum()
