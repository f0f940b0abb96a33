"""Self-distillation in the trainer: log-probabilities of the sampled tokens given more than the policy had."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from areal_core.data import Metric, PackedBatch, Ragged, shift_to_predictions
from areal_core.errors import RunError
from areal_core.sdk import ACTOR
from areal_finetuning.distillation import teacher_kl
from areal_finetuning.self_distillation import COLUMN, LEVEL
from areal_finetuning.self_distillation_config import self_teacher_role

if TYPE_CHECKING:
    from areal_core.sdk import Context
    from areal_finetuning.self_distillation_config import SelfDistillationAdvantageSettings


def self_teacher(batch: PackedBatch, context: Context, *, ema_decay: float | None) -> dict[str, torch.Tensor]:
    """Compute log π_teacher(y_t | c, y_<t) of each sampled token y_t (SDPO, arXiv 2601.20802).

    c is the prompt that the level `teacher` of the batch has for a sequence. The teacher's forward pass is on c and the
    same answer tokens, without gradients. Where c is empty, the teacher is the policy: log π_prox(y_t).

    Args:
        batch: shifted, with `input_ids`, `targets`, `turn_ids` and `proximal_logprobs` [T], and the level `teacher`.
        context: context of the trainer. It gets `teacher_share`, the share of sequences that have a teacher's prompt.
        ema_decay: None if the teacher is the policy itself, or else its decay.

    Returns:
        `teacher_logprobs` [T] float32.

    Raises:
        KeyError: the batch has no level `teacher`.
        RunError: a sequence has several turns.
    """
    if LEVEL not in batch.multimodal:
        # A KeyError, because the batch on which a user's own loss is tried before a run lacks what workflows add.
        raise KeyError(f"the batch has no prompts of a teacher ('{LEVEL}'): set workflow: finetuning/self_distillation")
    prompts = batch.multimodal[LEVEL]
    context.log("teacher_share", Metric.mean((prompts.lengths > 0).float()))
    teacher, sources, places = _with_teacher_prompts(batch, prompts)
    found = batch["proximal_logprobs"].clone()
    if len(sources):
        role = ACTOR if ema_decay is None else self_teacher_role(ema_decay)
        found[sources] = context.forward(role.name, teacher, ["logprobs"])["logprobs"][places].to(found)
    return {"teacher_logprobs": found}


def _with_teacher_prompts(batch: PackedBatch, prompts: Ragged) -> tuple[PackedBatch, torch.Tensor, torch.Tensor]:
    """Return a shifted batch of teacher's prompt and answer, for the sequences that have both.

    Args:
        batch: shifted, with B sequences.
        prompts: `teacher_prompt_ids` of each sequence.

    Returns:
        The batch, with `input_ids` and `targets`; positions of the sampled tokens in `batch`, [S] int64; and positions
        of the same tokens in the new batch, [S] int64.

    Raises:
        RunError: the sampled tokens of a sequence are not one run.
    """
    is_sampled, offsets, device = batch["turn_ids"] >= 0, batch.tokens.offsets.tolist(), batch.lengths.device
    parts, lengths, sources, places, start = [], [], [], [], 0
    for row, prompt in enumerate(torch.split(prompts.values[COLUMN], prompts.lengths.tolist())):
        positions = is_sampled[offsets[row] : offsets[row + 1]].nonzero()[:, 0] + offsets[row]
        count = len(positions)
        if not len(prompt) or not count:
            continue
        if int(positions[-1] - positions[0]) != count - 1:
            raise RunError("a sequence has several turns, and self-distillation takes one: use core/single_turn")
        parts += [prompt, batch["targets"][positions]]
        sources.append(positions)
        # The last token of the prompt predicts the first one of the answer.
        places.append(torch.arange(count, device=device) + start + len(prompt) - 1)
        lengths.append(len(prompt) + count)
        start += lengths[-1]
    none = [torch.zeros(0, dtype=torch.int64, device=device)]
    tokens = Ragged(torch.tensor(lengths, dtype=torch.int64, device=device), {"input_ids": torch.cat(parts or none)})
    if not sources:
        return PackedBatch(tokens), none[0], none[0]
    return shift_to_predictions(PackedBatch(tokens)), torch.cat(sources), torch.cat(places)


class SelfDistillationAdvantage:
    """The advantage (1 - λ) A_t + λ A(reward), with A_t = log π_teacher(y_t | c, y_<t) - log π_prox(y_t | x, y_<t).

    In expectation over a token, A_t alone gives the gradient of -KL(π(·|x, y_<t) ‖ π_teacher(·|c, y_<t)) (SDPO, arXiv
    2601.20802); see `distillation.teacher_kl`. It is 0 for an answer whose teacher knows no more than the policy. λ
    mixes it with an advantage from rewards, as in the paper.
    """

    def __init__(self, settings: SelfDistillationAdvantageSettings) -> None:
        self._weight = settings.reward_weight
        self._reward_advantage = settings.reward_advantage.build() if settings.reward_advantage is not None else None

    def __call__(self, batch: PackedBatch) -> torch.Tensor:
        """Return the advantages, [T] float32, 0 outside `loss_mask`.

        Args:
            batch: with `proximal_logprobs` and `teacher_logprobs`, [T].
        """
        if self._reward_advantage is None:
            return teacher_kl(batch, coefficient=1.0)
        advantages = teacher_kl(batch, coefficient=1 - self._weight)
        rewarded = self._reward_advantage(batch)
        if len(rewarded) == len(batch):
            rewarded = rewarded[batch.tokens.row_index]
        return advantages + self._weight * torch.where(batch["loss_mask"], rewarded, 0.0).to(advantages)
