"""What the tests of whole algorithms share: batches, models that answer what they are told, and compositions."""

import functools

import torch

from areal_core.algorithms.composition import PolicyGradient
from areal_core.config.context import ResolutionContext
from areal_core.config.sections import TrainingSection
from areal_core.plugins import PluginManager
from areal_core.training.context import BatchContext

GROUP, LONGEST = 4, 6
ROLES = {"actor": "proximal", "reference": "reference", "critic": "values"}
REWARDS = [1.0, 0.0, 0.0, 1.0, 0.3, 0.9, 0.1, 0.2, 0.0, 0.0, 1.0, 0.0]


def make_rollouts(make_batch):
    """Three groups of four; current, proximal and reference log-probabilities differ from the behavior's."""
    lengths = [LONGEST + 1 - row % 3 for row in range(len(REWARDS))]
    batch = make_batch(REWARDS, [row // GROUP for row in range(len(REWARDS))], lengths=lengths, seed=3)
    generator = torch.Generator().manual_seed(4)

    def near(spread):
        return batch["logprobs"] + spread * torch.randn(batch.token_count, generator=generator)

    passes = {"actor": near(0.4), "proximal": near(0.3), "reference": near(0.3)}
    versions = torch.arange(batch.token_count) % 5 - 1
    batch = batch.with_sequences(part_index=torch.zeros(len(batch), dtype=torch.int64))
    return batch.with_tokens(versions=versions, turn_ids=turns_of(batch)), passes


def turns_of(batch):
    """All that is learned from is of turn 0."""
    return torch.where(batch["loss_mask"], 0, -1)


def build(settings_type, **settings):
    return PolicyGradient(settings_type.model_validate(settings, context=ResolutionContext(plugins())))


@functools.cache
def plugins():
    return PluginManager.load(["grpo"])


class Engine:
    """A model that answers with these log-probabilities."""

    def __init__(self, logprobs):
        self._logprobs = logprobs

    def forward(self, batch, outputs):
        found = self._logprobs(batch) if callable(self._logprobs) else self._logprobs
        return dict.fromkeys(outputs, found)


def prepared(algorithm, batch, passes, updates=2):
    """The first update's batch, of as many as there are in epochs over the whole."""
    engines = {name: Engine(passes[key]) for name, key in ROLES.items() if key in passes}
    context = BatchContext(TrainingSection(num_epochs=updates), engines, version=4)
    ((work, *_), *_) = algorithm.updates(algorithm.prepare(batch, context), context)
    return work.batch
