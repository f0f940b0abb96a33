"""Batches and policy terms that expose wrong assumptions of a component, with fake outputs of models.

Episodes of a group are never adjacent. Group ids are far apart and not ascending. Sequences are ragged, and one has no
token in the loss mask. No two rewards of a group are equal.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

import torch

from areal_core.data import FinishReason, Generation, PackedBatch, Trajectory, shift_to_predictions
from areal_core.sdk import ACTOR, ForwardPass, PolicyTerms, run_passes
from areal_testing.fakes import FakeContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from areal_core.sdk import Role

ACTOR_OUTPUT, REFERENCE_OUTPUT, VALUES_OUTPUT = "fake_output/actor", "fake_output/reference", "fake_output/values"
"""Columns that hold the fake outputs of models, [T] float32. No component reads these names, so a component that reads
a column which it does not declare fails."""
GROUP_IDS = (1007, 13, 500_000, 42)
SIBLINGS = 3
HEAD = 5
"""K: number of likeliest tokens of each position."""
_TOPS = {"top_logprobs", "behavior_top_logprobs"}
_PER_TOKEN = {"logprobs", "proximal_logprobs", "behavior_logprobs", "advantages", "mask", "entropy", *_TOPS}


def make_batch(*, seed: int = 0, vocabulary: int = 61) -> PackedBatch:
    """Return a shifted batch of 4 groups of 3 episodes, as the trainer passes it to an algorithm.

    It has the fields of the rollout runtime and the log-probabilities of `HEAD` likeliest tokens. Each token also has
    `place` (its index in this batch, which stays if sequences are selected) and the fake outputs of models under
    `fake_output/`. `with_passes` adds those that a component declares, under the names that it declares.
    """
    generator = torch.Generator().manual_seed(seed)
    trajectories = [_trajectory(generator, vocabulary) for _ in range(len(GROUP_IDS) * SIBLINGS)]
    batch = PackedBatch.from_trajectories(trajectories)
    rows, total = len(batch), batch.token_count
    loss_mask = batch["loss_mask"].clone()
    loss_mask[: int(batch.lengths[0])] = False
    batch = batch.with_tokens(
        **{
            "loss_mask": loss_mask,
            ACTOR_OUTPUT: batch["logprobs"] + 0.6 * torch.randn(total, generator=generator),
            REFERENCE_OUTPUT: batch["logprobs"] + 0.6 * torch.randn(total, generator=generator),
            VALUES_OUTPUT: torch.randn(total, generator=generator),
        }
    )
    heads = torch.randn(total, HEAD + 1, generator=torch.Generator().manual_seed(seed + 2)).log_softmax(-1)
    top_ids = torch.arange(HEAD, dtype=torch.int32).expand(total, HEAD)
    batch = batch.with_tokens(top_ids=top_ids, top_logprobs=heads[:, :HEAD])
    number = torch.arange(rows)
    batch = batch.with_sequences(
        reward=torch.randperm(rows, generator=generator).float() / 4 - 1,
        group_id=torch.tensor(GROUP_IDS)[number % len(GROUP_IDS)],
        episode_id=9000 - 7 * number,
        prompt_id=torch.stack([number % len(GROUP_IDS), torch.zeros_like(number)], 1),
        sample_index=number // len(GROUP_IDS),
        part_index=torch.zeros_like(number),
        agent_id=torch.zeros_like(number),
    )
    return shift_to_predictions(batch).with_tokens(place=torch.arange(total))


def _trajectory(generator: torch.Generator, vocabulary: int) -> Trajectory:
    prompt, output = (int(n) for n in torch.randint(1, 12, (2,), generator=generator))
    ids = torch.randint(vocabulary, (prompt + output,), generator=generator).tolist()
    logprobs = (-0.05 - 2 * torch.rand(output, generator=generator)).tolist()
    return Trajectory.from_generation(ids[:prompt], Generation(ids[prompt:], logprobs, [3] * output, FinishReason.STOP))


def with_passes(batch: PackedBatch, needs: Iterable[Role | ForwardPass]) -> PackedBatch:
    """Return the batch with the columns of the forward passes that components need; see `Settings.needs`."""
    return run_passes(batch, needs, FakeContext(outputs_of))


def outputs_of(role: str, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return a role's fake outputs for a batch, by name.

    Sequences that the algorithm made itself have no columns of fake outputs. Theirs depend on the tokens.
    """
    if ACTOR_OUTPUT not in batch:
        mixed = 37 * batch["targets"] + 11 * batch["input_ids"]
        fakes = {
            name: -0.05 - (mixed * factor % 101) / 50
            for name, factor in ((ACTOR_OUTPUT, 1), (REFERENCE_OUTPUT, 3), (VALUES_OUTPUT, 7))
        }
        batch = batch.with_tokens(**fakes)
    logprobs = batch[ACTOR_OUTPUT if role == ACTOR.name else REFERENCE_OUTPUT]
    return {name: fake_output(name, logprobs, batch) for name in outputs}


def fake_output(output: str, logprobs: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """Return a fake engine output that belongs to these log-probabilities [T].

    It is [T], but [T, 2] for `hidden` and [T, HEAD] for `top_logprobs`.
    """
    if output.startswith("divergence:"):
        return logprobs.square()
    known = {"logprobs": logprobs, "values": batch[VALUES_OUTPUT], "entropy": logprobs.abs()}
    known["sum_pi_squared"] = logprobs.exp()
    if output == "top_logprobs":
        return batch["top_logprobs"] + 0.1 * logprobs[:, None]
    return torch.stack([logprobs, batch[VALUES_OUTPUT]], 1) if output == "hidden" else known[output]


def make_terms(needs: Iterable[Role | ForwardPass] = (), *, seed: int = 0, distance: float = 0.3) -> PolicyTerms:
    """Return the arguments of a policy loss for the sequences of `make_batch`.

    Args:
        needs: the component's needs; only their columns are included.
        seed: seed of all values.
        distance: standard deviation of the log-probabilities' differences between the policies; 0 is on policy.
    """
    batch = make_batch(seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)

    def noise() -> torch.Tensor:
        return torch.randn(batch.token_count, generator=generator)

    current = -0.05 - 2 * torch.rand(batch.token_count, generator=generator)
    row_index, proximal = batch.tokens.row_index, current + distance * noise()
    heads = 2 * torch.randn(batch.token_count, HEAD + 1, generator=generator)
    sampler = heads + distance * torch.randn(heads.shape, generator=generator)
    terms = PolicyTerms(
        logprobs=current.clone().requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=current + distance * noise(),
        advantages=torch.randn(len(batch), generator=generator)[row_index],
        mask=batch["loss_mask"],
        row_index=row_index,
        rows=len(batch),
        entropy=(noise().abs()).requires_grad_(),
        top_logprobs=heads.log_softmax(-1)[:, :HEAD].clone().requires_grad_(),
        behavior_top_logprobs=sampler.log_softmax(-1)[:, :HEAD],
    )
    columns = {}
    for need in needs:
        if isinstance(need, ForwardPass):
            policy = proximal if need.role == ACTOR else current + distance * noise()
            columns[need.column] = policy if need.output == "logprobs" else policy.abs()
    return replace(terms, columns=columns)


def select_terms(terms: PolicyTerms, rows: Sequence[int]) -> tuple[PolicyTerms, torch.Tensor]:
    """Return the terms of some sequences, in this order, and the indices of their tokens in `terms`."""
    places = torch.cat([(terms.row_index == row).nonzero()[:, 0] for row in rows])
    lengths = torch.tensor([int((terms.row_index == row).sum()) for row in rows])
    selected = {
        item.name: value[places] for item in fields(terms) if (value := _per_token(terms, item.name)) is not None
    }
    index = torch.repeat_interleave(torch.arange(len(rows)), lengths)
    columns = {name: value[places] for name, value in terms.columns.items()}
    return replace(terms, **selected, row_index=index, rows=len(rows), columns=columns), places


def _per_token(terms: PolicyTerms, name: str) -> torch.Tensor | None:
    return getattr(terms, name) if name in _PER_TOKEN else None


def with_garbage(terms: PolicyTerms) -> PolicyTerms:
    """Return the same terms with random values at every token outside the mask."""
    generator = torch.Generator().manual_seed(99)

    def spoiled(value: torch.Tensor | None) -> torch.Tensor | None:
        if value is None:
            return None
        other = 20 * torch.randn(value.shape, generator=generator)
        mask = terms.mask if value.dim() == 1 else terms.mask[:, None]
        return torch.where(mask, value.detach(), other).requires_grad_(value.requires_grad)

    names = sorted(_PER_TOKEN - {"mask"})
    columns = {name: spoiled(value) for name, value in terms.columns.items()}
    spoiled_terms = {name: spoiled(_per_token(terms, name)) for name in names}
    return replace(terms, **spoiled_terms, columns=columns)  # type: ignore[arg-type]
