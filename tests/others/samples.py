"""Random batches for the comparisons, packed for areal and padded for the others, and what areal computes of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from areal_core.config.context import ResolutionContext
from areal_core.config.sections import TrainingSection
from areal_core.data import Episode, FinishReason, Generation, PackedBatch, TrajectoryBuilder, shift_to_predictions
from areal_core.data.packing import pack_group
from areal_core.plugins import PluginManager
from areal_core.training.context import BatchContext

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.random import Generator

GROUPS, GROUP_SIZE, LONGEST = 4, 4, 64
LEAVES = ("current", "entropy", "values")
"""Outputs of the model that learns: the tensors that gradients are compared of."""
OUTPUTS = {"logprobs": "current", "entropy": "entropy", "values": "values"}
"""The leaf that is an engine's output."""


@dataclass(frozen=True)
class Shape:
    """Form of a batch: 4 prompts with 4 answers each, of 1 to `turns` turns with tokens of tools between them.

    Attributes:
        turns: Largest number of turns.
        token_rewards: Whether tokens have rewards of their own.
        empty: Whether one answer has no token in the loss.
        on_policy: Whether the policy is still that of the start of the batch, as in the first update.
        pairs: Whether the sequences are pairs of a chosen and a rejected one.
    """

    turns: int = 3
    token_rewards: bool = False
    empty: bool = False
    on_policy: bool = False
    pairs: bool = False


SHAPES = (Shape(turns=1), Shape())


@dataclass(frozen=True)
class Sample:
    """A batch and the numbers that models compute of it.

    Attributes:
        batch: The batch of areal: T tokens in a row, position t describes token t + 1.
        passes: [T] float32 by name: log-probabilities of the `proximal`, `reference` and `teacher` models,
            `old_values`, `returns`, and the leaves.
        state: State of the algorithm.
    """

    batch: PackedBatch
    passes: Mapping[str, torch.Tensor]
    state: dict[str, torch.Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> torch.Tensor:
        """Return a pass as the other libraries have it: padded, [sequences, longest], 0 where nothing is."""
        if name.startswith("_") or name not in self.passes:
            raise AttributeError(name)
        return self.pad(self.passes[name])

    @property
    def leaves(self) -> list[torch.Tensor]:
        """Tensors with gradients."""
        return [self.passes[name] for name in LEAVES]

    @property
    def mask(self) -> torch.Tensor:
        """Tokens in the loss, [sequences, longest] float32."""
        return self.pad(self.batch["loss_mask"].float())

    @property
    def behavior(self) -> torch.Tensor:
        """Log-probabilities under the policy that sampled, padded."""
        return self.pad(self.batch["logprobs"])

    @property
    def ratio(self) -> torch.Tensor:
        """π_prox / μ of the tokens in the loss, padded."""
        return torch.exp(self.proximal - self.behavior) * self.mask

    @property
    def group(self) -> np.ndarray[Any, Any]:
        """Group of each sequence."""
        return self.batch["group_id"].numpy()

    @property
    def rewards(self) -> torch.Tensor:
        """Reward of each token, padded: that of the episode is at the last token in the loss."""
        rewards, mask = torch.zeros_like(self.mask), self.mask
        last = (mask * torch.arange(mask.shape[1])).argmax(1)
        rewards[torch.arange(len(mask)), last] = self.batch["reward"]
        tokens = self.batch.get("token_rewards")
        return rewards if tokens is None else rewards + self.pad(tokens) * mask

    @property
    def advantages(self) -> torch.Tensor:
        """GRPO's advantages, padded. Comparisons of losses give the same advantages to both sides."""
        return self.pad(advantages("grpo/group_normalized")(self))

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """Return [sequences, longest] of [T], filled with 0."""
        rows = torch.split(flat, self.batch.lengths.tolist())
        return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)

    def sides(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the values of the chosen and of the rejected sequences, of a batch of pairs."""
        return values[0::2], values[1::2]

    def sums(self, padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sums over the tokens in the loss of the chosen and of the rejected sequences."""
        return self.sides((padded * self.mask).sum(1))

    def means(self, padded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the means over the tokens in the loss of the chosen and of the rejected sequences."""
        return self.sides((padded * self.mask).sum(1) / self.mask.sum(1))


def sample(seed: int, shape: Shape) -> Sample:
    """Return the sample of a seed: the same numbers on every machine."""
    random = np.random.default_rng(seed)
    torch.manual_seed(seed)
    groups = []
    for group in range(GROUPS):
        episodes = {}
        for number in range(GROUP_SIZE):
            reward = 1.0 if group == 0 else round(float(random.normal()), 3)  # one group without any difference
            named = {name: round(float(random.normal()), 3) for name in ("first", "second")}
            trajectory = _trajectory(random, shape)
            if shape.empty and group == number == 1:
                trajectory.tokens["loss_mask"] = np.zeros(len(trajectory), bool)
            episodes[number] = Episode([trajectory], reward, named)
        groups.append(PackedBatch.from_columns(pack_group(group, (group, 0), GROUP_SIZE, episodes)))
    batch = shift_to_predictions(PackedBatch.concatenate(groups))
    if shape.pairs:
        pair = torch.arange(len(batch)) // 2
        batch = batch.with_sequences(is_chosen=torch.arange(len(batch)) % 2 == 0, margin=torch.rand(len(batch)))
        batch = batch.with_units(pair)
    elsewhere = -5 * torch.rand(batch.token_count)  # of tokens outside the loss models may think anything
    base = torch.where(batch["loss_mask"], batch["logprobs"], elsewhere)
    proximal = _near(base, 0.3)
    passes = {
        "proximal": proximal,
        "current": proximal.clone() if shape.on_policy else _near(proximal, 0.25),
        "reference": _near(base, 0.5),
        "teacher": _near(base, 0.7),
        "squares": proximal.exp() ** 2 + (1 - proximal.exp()) ** 2 * torch.rand(batch.token_count),
        "entropy": 3 * torch.rand(batch.token_count),
        "old_values": torch.randn(batch.token_count),
        "values": torch.randn(batch.token_count),
        "returns": torch.randn(batch.token_count),
    }
    for name in LEAVES:
        passes[name].requires_grad_()
    return Sample(batch, passes)


def _trajectory(random: Generator, shape: Shape) -> Any:
    builder = TrajectoryBuilder()
    builder.add_context(random.integers(0, 50, random.integers(2, 6)).tolist())
    for turn in range(int(random.integers(1, shape.turns + 1))):
        if turn:
            builder.add_context(random.integers(0, 50, random.integers(1, 4)).tolist())
        length = int(random.integers(1, 8))
        reason = FinishReason.LENGTH if random.random() < 0.25 else FinishReason.STOP
        logprobs, versions = -random.exponential(1.2, length), np.sort(random.integers(0, 4, length))
        ids = random.integers(0, 50, length).tolist()
        builder.add_generation(Generation(ids, logprobs.tolist(), versions.tolist(), reason))
    trajectory = builder.build()
    if shape.token_rewards:
        trajectory.tokens["token_rewards"] = (0.3 * random.normal(size=len(trajectory))).astype(np.float32)
    return trajectory


def _near(logprobs: torch.Tensor, spread: float) -> torch.Tensor:
    return (logprobs + spread * torch.randn(len(logprobs))).clamp(max=-1e-4)


@functools.cache
def plugins() -> PluginManager:
    """Return areal's plugins that have algorithms."""
    return PluginManager.load(["grpo", "finetuning"])


def build(kind: str, name: str, **settings: Any) -> tuple[Any, Any]:
    """Return a component and its settings, by its name in the plugin system."""
    record = plugins().find(kind, name)
    schema: Any = plugins().import_from(record, str(record.config))
    return plugins().import_from(record, record.target), schema.model_validate(
        settings, context=ResolutionContext(plugins())
    )


@dataclass
class _Engine:
    """A model that computes what a sample says of its batch."""

    outputs: dict[str, torch.Tensor]

    def forward(self, batch: PackedBatch, outputs: Sequence[str]) -> dict[str, torch.Tensor]:
        return {name: self.outputs[name].detach() for name in outputs}


def context(given: Sample) -> BatchContext:
    """Return the context of a step with two updates: the first one is not on policy."""
    passes = given.passes
    engines: Any = {
        "actor": _Engine({"logprobs": passes["proximal"], "entropy": passes["entropy"]}),
        "reference": _Engine({"logprobs": passes["reference"]}),
        "teacher": _Engine({"logprobs": passes["teacher"]}),
        "critic": _Engine({"values": passes["old_values"]}),
    }
    return BatchContext(TrainingSection(num_epochs=2), engines, version=4, state=given.state)


def loss(name: str, **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return the function that computes the loss of an algorithm, as the trainer does: over several micro-batches."""

    def compute(given: Sample) -> torch.Tensor:
        component, chosen = build("algorithms", name, **settings)
        algorithm, step = component(chosen), context(given)
        spec = next(iter(algorithm.updates(algorithm.prepare(given.batch, step), step)))[0]
        batch = spec.batch.with_tokens(position=torch.arange(given.batch.token_count))
        total = torch.zeros(())
        units = torch.arange(len(batch)) if batch.unit_index is None else batch.unit_index
        for part in (units % 3 == 0, units % 3 == 1, units % 3 == 2):
            rows = batch.select(part.nonzero()[:, 0].tolist())
            outputs = {key: given.passes[OUTPUTS[key]][rows["position"]] for key in spec.outputs}
            total = total + spec.loss(rows, outputs).loss
        return total

    return compute


def policy_gradient(**settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return `loss` of a composition with GRPO's advantages; by default the mean of PPO's loss over all tokens."""
    parts = {"advantage": "grpo/group_normalized", "policy_loss": "grpo/ppo_clip", **settings}
    return loss("core/policy_gradient", **parts)


def advantages(name: str, column: str = "advantages", **settings: Any) -> Callable[[Sample], torch.Tensor]:
    """Return the function that computes advantages, or another column of them, [T], 0 outside the loss."""

    def compute(given: Sample) -> torch.Tensor:
        component, chosen = build("advantages", name, **settings)
        batch = given.batch.with_tokens(
            values=given.passes["old_values"],
            proximal_logprobs=given.passes["proximal"],
            teacher_logprobs=given.passes["teacher"],
            sum_pi_squared=given.passes["squares"],
        )
        found = component(batch, **dict(chosen))
        values = found[column] if isinstance(found, dict) else found
        by_token = values if len(values) == batch.token_count else values[batch.tokens.row_index]
        return torch.where(batch["loss_mask"], by_token, 0.0)

    return compute
