"""A task on which algorithms can be compared in seconds: tables instead of language models, everything else is areal's.

48 contexts, answers of 24 positions with 16 tokens each. The policy is a table of logits of rank 12; a warm start hits
the right token at 0.42 of the positions, and an answer is worth 1 where more than 0.55 of it is right, else 0. So few
answers are right at first, and the low rank makes what is learned of one context change all others: stale samples hurt.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from areal_core.config.context import ResolutionContext
from areal_core.config.place import Place
from areal_core.config.sections import TrainingSection
from areal_core.data import Metric, PackedBatch, Ragged, combine, shift_to_predictions
from areal_core.plugins import PluginManager
from areal_core.training.context import BatchContext

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from areal_core.sdk import Algorithm, LossSpec

CONTEXTS, POSITIONS, TOKENS, RANK = 48, 24, 16, 12
PROMPTS, SAMPLES = 16, 8
WARM, BAR = 0.42, 0.55


class Table:
    """A policy: logits of rank 12 for each context and position; plays a training engine.

    Args:
        right: [contexts x positions] the tokens that are right.
        seed: of the weights.
        learning_rate: of Adam.
    """

    def __init__(self, right: torch.Tensor, seed: int, learning_rate: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        cells = CONTEXTS * POSITIONS
        self.left = torch.randn(cells, RANK, generator=generator).mul_(0.3).requires_grad_()
        self.up = torch.randn(RANK, TOKENS, generator=generator).mul_(0.3).requires_grad_()
        self._warm_up(right)
        self._optimizer = torch.optim.Adam([self.left, self.up], learning_rate)

    def _warm_up(self, right: torch.Tensor) -> None:
        optimizer = torch.optim.Adam([self.left, self.up], 0.02)
        for _ in range(1000):
            logprobs = self.logits().log_softmax(-1).gather(1, right[:, None])
            if float(logprobs.detach().exp().mean()) >= WARM:
                return
            optimizer.zero_grad()
            (-logprobs.mean()).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        raise AssertionError("the warm start does not reach its share of right tokens")

    def logits(self) -> torch.Tensor:
        """[contexts x positions, tokens]."""
        return self.left @ self.up

    def _outputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        logprobs = self.logits()[batch["cell"]].log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return {"logprobs": logprobs.gather(1, batch["targets"][:, None])[:, 0], "entropy": entropy}

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        """See `TrainEngine.forward`."""
        with torch.no_grad():
            found = self._outputs(batch)
        return {name: found[name] for name in outputs}

    def train(self, works: Sequence[LossSpec]) -> dict[str, Metric]:
        """See `TrainEngine.train`; the gradient is clipped to a norm of 1."""
        self._optimizer.zero_grad()
        results = [work.loss(work.batch, self._outputs(work.batch)) for work in works]
        torch.stack([result.loss for result in results]).sum().backward()  # type: ignore[no-untyped-call]
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        self._optimizer.step()
        return combine(result.metrics for result in results)


class Critic(Table):
    """A value for each context and position."""

    def __init__(self, learning_rate: float) -> None:
        self.values = torch.zeros(CONTEXTS * POSITIONS, requires_grad=True)
        self._optimizer = torch.optim.Adam([self.values], learning_rate)

    def _outputs(self, batch: PackedBatch) -> dict[str, torch.Tensor]:
        return {"values": self.values[batch["cell"]]}


class Rollouts:
    """Samples answers with the policy as it was some batches ago.

    Args:
        right: as in `Table`.
        staleness: batches between the weights that sample and those that learn.
        seed: of prompts and samples.
    """

    def __init__(self, right: torch.Tensor, staleness: int, seed: int) -> None:
        self._right = right.view(CONTEXTS, POSITIONS)
        self._generator = torch.Generator().manual_seed(seed)
        self._past: deque[torch.Tensor] = deque(maxlen=staleness + 1)

    def batch(self, policy: Table, step: int) -> PackedBatch:
        """The batch of a step, shifted; `reward` is 0 or 1."""
        self._past.append(policy.logits().detach())
        logprobs = self._past[0].log_softmax(-1).view(CONTEXTS, POSITIONS, TOKENS)
        version = step + 1 - len(self._past)
        contexts = torch.randperm(CONTEXTS, generator=self._generator)[:PROMPTS].repeat_interleave(SAMPLES)
        rows = len(contexts)
        chances = logprobs[contexts].exp().view(-1, TOKENS)
        answers = torch.multinomial(chances, 1, generator=self._generator).view(rows, POSITIONS)
        said = logprobs[contexts].gather(2, answers[..., None])[..., 0]
        nothing = torch.zeros(rows, 1)
        cells = contexts[:, None] * POSITIONS + torch.arange(POSITIONS)
        values = {
            "input_ids": torch.cat([torch.zeros(rows, 1, dtype=torch.int64), answers], 1),
            "loss_mask": torch.cat([nothing.bool(), torch.ones_like(said, dtype=torch.bool)], 1),
            "logprobs": torch.cat([nothing, said], 1),
            "versions": torch.cat([nothing.int() - 1, torch.full((rows, POSITIONS), version, dtype=torch.int32)], 1),
            "turn_ids": torch.cat([nothing.int() - 1, torch.zeros(rows, POSITIONS, dtype=torch.int32)], 1),
            "cell": torch.cat([torch.zeros(rows, 1, dtype=torch.int64), cells], 1),
        }
        tokens = Ragged(torch.full((rows,), POSITIONS + 1), {key: value.flatten() for key, value in values.items()})
        hits = (answers == self._right[contexts]).float().mean(1)
        number = torch.arange(rows)
        sequences = {
            "reward": (hits > BAR).float(),
            "group_id": step * PROMPTS + number // SAMPLES,
            "episode_id": step * rows + number,
            "part_index": torch.zeros(rows, dtype=torch.int64),
            "finish_reason": torch.zeros(rows, dtype=torch.int8),
        }
        return shift_to_predictions(PackedBatch(tokens, sequences))


def build(algorithm: str | Mapping[str, Any]) -> Algorithm:
    """An algorithm as a config writes it."""
    written = {"type": algorithm} if isinstance(algorithm, str) else algorithm
    context = ResolutionContext(PluginManager.load(["grpo"]))
    made: Algorithm = Place("algorithms").select(written, context).build()
    return made


def learn(
    algorithm: str | Mapping[str, Any],
    *,
    steps: int,
    staleness: int = 0,
    seed: int = 0,
    learning_rate: float = 0.03,
    section: TrainingSection | None = None,
) -> Iterator[dict[str, float]]:
    """Train, and give each step's metrics, with the mean reward of the batch and of the policy behind it.

    Args:
        algorithm: as a config writes it.
        steps: batches.
        staleness: see `Rollouts`.
        seed: of everything.
        learning_rate: of the policy.
        section: how a batch is cut; None is four updates.
    """
    right = torch.randint(TOKENS, (CONTEXTS * POSITIONS,), generator=torch.Generator().manual_seed(1000 + seed))
    policy, made = Table(right, seed, learning_rate), build(algorithm)
    engines: dict[str, Any] = {"actor": policy, "critic": Critic(0.03), "reference": Table(right, seed, 0.0)}
    rollouts, state = Rollouts(right, staleness, seed), dict[str, torch.Tensor]()
    for step in range(steps):
        batch = rollouts.batch(policy, step)
        context = BatchContext(section or TrainingSection(num_minibatches=4), engines, seed, step, step, state)
        prepared = made.prepare(batch, context)
        parts: list[dict[str, Metric]] = []
        for works in made.updates(prepared, context):
            for role in dict.fromkeys(work.role for work in works):
                parts.append(engines[role].train([work for work in works if work.role == role]))
        numbers = {
            key: n for name, m in combine([*parts, context.metrics]).items() for key, n in m.as_numbers(name).items()
        }
        yield {**numbers, "reward": float(batch["reward"].mean())}
