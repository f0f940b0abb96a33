"""A reward, a workflow, an advantage and a policy loss of one's own; `custom_parts.yaml` uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from areal_core.data import Episode, TrajectoryBuilder, group_mean

if TYPE_CHECKING:
    from collections.abc import Mapping

    from areal_core.data import PackedBatch
    from areal_core.sdk import PolicyTerms, WorkflowContext


def brevity(completion: str, *, free: int = 16) -> float:
    """Minus one for each character over the free ones, as a tenth."""
    return -max(0, len(completion) - free) / 10


class AskAgain:
    """Lets the policy answer again, behind its own wrong answer, until it is right or has no attempt left."""

    def __init__(self, attempts: int = 2) -> None:
        self._attempts = attempts

    async def run_episode(self, row: Mapping[str, Any], context: WorkflowContext) -> Episode:
        """One trajectory: prompt, answer, prompt again, answer again; the reward is that of the last answer."""
        prompt = context.tokenizer.encode(row["prompt"], add_special_tokens=False)
        builder = TrajectoryBuilder()
        penalty = 0.0
        for attempt in range(self._attempts):
            penalty = 0.1 * attempt
            builder.add_context(prompt)
            answer = await context.generate(builder.input_ids)
            builder.add_generation(answer)
            text = context.tokenizer.decode(answer.output_ids, skip_special_tokens=True)
            score = await context.score(
                prompt=row["prompt"],
                completion=text,
                completion_ids=answer.output_ids,
                finish_reason=answer.finish_reason,
            )
            if score.components["right"]:
                break
        return Episode([builder.build()], score.value - penalty, dict(score.components), text=f"{row['prompt']}{text}")


def best_of_group(batch: PackedBatch) -> torch.Tensor:
    """The distance to the group's mean, cut at zero from below: only what is better than its siblings is learned."""
    return (batch["reward"] - group_mean(batch, batch["reward"])).clamp(min=0)


def soft_clip(terms: PolicyTerms, *, width: float = 0.2) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """-A width tanh((r - 1) / width) with r = π / π_proximal: the gradient fades out instead of being cut off."""
    ratio = torch.exp((terms.logprobs - terms.proximal_logprobs).clamp(-20, 20))
    return -terms.advantages * width * torch.tanh((ratio - 1) / width), {"ratio": ratio}
