"""Routers of an MoE in training: load-balancing loss, metrics, and routing replay.

The loss is that of Switch Transformer (arXiv 2101.03961, eq. 4), summed over layers: E x sum f_i P_i over the E experts
of a layer, with f_i the share of tokens that chose expert i, and P_i its mean probability. It is 1 if balanced.
f and P are computed for each sequence (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20) and weighted by its tokens, so that
the gradient does not depend on how an update is packed and split.

Routing replay (R3, arXiv 2510.11370): if the batch has the experts that generated a token, the token uses these
experts, weighted by this model's own probabilities. So gradients flow to the router as without replay. f then counts
the replayed choices.
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
"""Supported routers: their probabilities are a softmax of logits, and they return (logits, scores, choices).

Other routers compute as in transformers: they have no metrics, and router_loss or replay raises an error.
"""


def choices_of(batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Return a batch's column with the experts that generated each token, by name; empty without it."""
    return {ROUTED_EXPERTS: batch[ROUTED_EXPERTS]} if ROUTED_EXPERTS in batch else {}


def _choices(batch: PackedBatch, role: Role) -> torch.Tensor | None:
    """Return the experts [T, layers, choices] to replay; None for roles other than the policy."""
    return batch.get(ROUTED_EXPERTS) if role.trains and role.head == "vocabulary" else None


class Routing:
    """State that all routers of a model share.

    Args:
        model: an MoE, or any other model, for which this does nothing.
        weight: weight of the load-balancing loss, 0 for none.

    Raises:
        RunError: the weight is not 0, and the model has no supported routers.
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
                f"router_loss is {weight}, but model type {model.config.model_type} has no supported routers",
                hints=["set train_engine.router_loss to 0"],
            )

    def check(self, batch: PackedBatch, role: Role) -> None:
        """Raise RunError if the choices of a batch on the CPU do not fit this model's routers."""
        if (experts := _choices(batch, role)) is None or not len(experts):
            return
        routers = self._routers
        layers, choices, count = (len(routers), routers[0].top_k, routers[0].num_experts) if routers else (0, 0, 0)
        largest = int(experts.max())
        if list(experts.shape[1:]) != [layers, choices] or largest > count:
            raise RunError(
                f"the batch has {experts.shape[2]} experts per token in each of {experts.shape[1]} layers, up to "
                f"expert {largest}; the model has {choices} of {count} experts in each of {layers} layers",
                hints=["generate with the trained model, or set inference_engine.routed_experts to false"],
            )

    def replay(self, part: PackedBatch | None, role: Role, layout: Layout, context: Context | None) -> None:
        """Set the experts that the next forward pass replays, or none.

        Args:
            part: the micro-batch on the device; None, or one without choices, disables replay.
            role: the model's role; replay is only for the policy.
            layout: layout of the micro-batch, including padding.
            context: context parallelism, or None.
        """
        chosen: Iterable[torch.Tensor | None] = repeat(None)
        if part is not None and (experts := _choices(part, role)) is not None:
            total = len(layout.position_ids)
            experts = layout.computed(F.pad(experts, (0, 0, 0, 0, 0, total - len(experts))), filling=0)
            experts = experts if context is None else context.own(experts, total)
            chosen = experts.unbind(1)
        for router, experts in zip(self._routers, chosen, strict=False):
            # A copy, because views with different offsets would make different compiled graphs for the layers.
            router.replayed = None if experts is None else experts.clone(memory_format=torch.contiguous_format)
            if experts is not None:
                mark_dynamic(router.replayed, 0)

    def watch(
        self, lengths: torch.Tensor, layout: Layout, total: int, context: Context | None, *, counts: bool
    ) -> None:
        """Count the routers' choices, and compute their loss, in forward passes until `rest` is called.

        Args:
            lengths: [B] int64 on the device, lengths of the sequences of a micro-batch.
            layout: layout of the micro-batch, including padding.
            total: tokens of the update, on all ranks.
            context: context parallelism, or None. With it the balance of whole sequences is unknown.
            counts: False for a dummy micro-batch.
        """
        if not self._routers:
            return
        tokens = len(layout.position_ids)
        lengths = lengths * counts  # all tokens of a dummy micro-batch are padding
        numbers = torch.arange(len(lengths) + 1, device=lengths.device)
        padding = (tokens - lengths.sum()).unsqueeze(0)
        self.sequence = numbers.repeat_interleave(torch.cat([lengths, padding]), output_size=tokens)
        self.sequence = layout.computed(self.sequence, filling=len(lengths))
        if context is not None:
            self._knows_sequences = False
            self.sequence = context.own(self.sequence, tokens)
        self.sizes = torch.zeros_like(numbers).index_add(0, self.sequence, torch.ones_like(self.sequence)).float()
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
        sums = torch.stack([router.found for router in self._routers])
        for router in self._routers:
            router.found.zero_()
        if rank_and_ranks()[1] > 1:
            dist.all_reduce(sums)
        counts, (entropy, loss, tokens, replayed, differing) = sums[:, :-5], sums[:, -5:].T
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
    """Returns the scores unchanged, and gives the loss a gradient of 1 in the backward pass."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return gradient, gradient.new_ones((), dtype=torch.float32)


@cache
def _watched_class(kind: Any) -> Any:
    """Return a subclass of a router, which returns logits [T, E], scores [T, K] and choices [T, K].

    The class is cached, because the compiler makes a graph for each class.
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
    """Return the weights [T, K] float32 of experts [T, K], computed like those of the router's own choices."""
    chances = torch.softmax(logits.float(), -1).gather(1, chosen)
    norms = getattr(router, "norm_topk_prob", True)  # routers without the attribute always normalize
    return chances / chances.sum(-1, keepdim=True) if norms else chances


def _differences(
    replayed: torch.Tensor | None, own: torch.Tensor, picked: torch.Tensor, counted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of replayed choices, and of the router's own choices that replay replaced.

    Args:
        replayed: [T, K], 0 for choices that are not replayed.
        own: [T, K], the router's own choices.
        picked: [T, E] float32, 1 for the experts that a token uses.
        counted: [T] float32, 0 for tokens that do not count.
    """
    if replayed is None:
        return picked.new_zeros(()), picked.new_zeros(())
    is_replayed = (replayed > 0) * counted.unsqueeze(-1)
    return is_replayed.sum(), (is_replayed * (1 - picked.gather(1, own))).sum()
