"""Test the suite of training engines: a correct engine passes, and each broken one fails its test."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from areal_core.data import Metric, PackedBatch, combine
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_core.sdk import REFERENCE as REFERENCE_ROLE
from areal_fsdp.attention.hugging_face import Layout
from areal_fsdp.checkpoint import checkpoint_state, read_checkpoint, write_checkpoint
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_fsdp.models.export import write_model
from areal_testing.conformance import TrainEngineSuite

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _one_thread():
    """More threads only slow such small models down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class TestCorrectEngine(TrainEngineSuite):
    """Tests of the engine from which every mutant derives."""

    engine_type = FSDPEngine
    more_outputs = ("top_logprobs", "sum_pi_squared")

    def make_engine(self, **settings):
        return self.engine_type(FSDPConfig(**settings))


class OneLossSpec(FSDPEngine):
    """The base of mutants whose training is broken."""

    def train(self, loss_specs):
        (loss_spec,) = loss_specs
        return self.train_one(loss_spec.batch, loss_spec.loss, loss_spec.outputs)

    def train_one(self, batch, loss, outputs):
        return super().train([LossSpec("any", batch, outputs, loss)])


class OffByOneShift(FSDPEngine):
    """Takes the logits at position t for those of the token at t."""

    def _compute(self, part, place, outputs):
        return super()._compute(part.with_tokens(targets=part["input_ids"]), place, outputs)


class TopLogprobsOfTheTokensBefore(FSDPEngine):
    """Takes the likeliest tokens of the previous position."""

    def _compute(self, part, place, outputs):
        moved = {"top_ids": part["top_ids"].roll(1, 0)} if "top_ids" in part else {}
        return super()._compute(part.with_tokens(**moved), place, outputs)


class TopLogprobsWithoutAGradient(FSDPEngine):
    def _compute(self, part, place, outputs):
        computed = super()._compute(part, place, outputs)
        return {name: value.detach() if name == "top_logprobs" else value for name, value in computed.items()}


class SquaresOfTheSampledToken(FSDPEngine):
    """Squares the probability of the token instead of summing over the vocabulary."""

    def _compute(self, part, place, outputs):
        computed = super()._compute(part, place, ["logprobs", *outputs])
        return {
            name: (2 * computed["logprobs"]).exp() if name == "sum_pi_squared" else computed[name] for name in outputs
        }


class PaddingCountedInTheLoss(FSDPEngine):
    """Pads each micro-batch with a sequence and does not mask it."""

    def _rounds(self, batch, loss_spec):
        for part, _, counts in super()._rounds(batch, loss_spec):
            filled = PackedBatch.concatenate([part, part.select([0])])
            yield filled, (Layout.of(filled.lengths, self._device), None), counts


class SequencesSeeEachOther(FSDPEngine):
    def _compute(self, part, place, outputs):
        together = Layout.of([part.token_count], self._device)
        return super()._compute(part, (replace(place[0], packed=together.packed), None), outputs)


class TemperatureIgnored(FSDPEngine):
    def setup(self, model, role, settings):
        super().setup(model, role, replace(settings, temperature=1.0))


class MeanOverMicrobatches(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        parts = len(self._plan(batch).microbatches)

        def mean(part, computed):
            result = loss(part, computed)
            return LossResult(result.loss / parts, result.metrics)

        return super().train_one(batch, mean, outputs)


class MeanGradientWithSummedLoss(OneLossSpec):
    """Reports the right loss, but has a wrong gradient."""

    def train_one(self, batch, loss, outputs):
        parts = len(self._plan(batch).microbatches)

        def mean(part, computed):
            result = loss(part, computed)
            shown = result.loss.detach()
            return LossResult(shown + (result.loss - shown) / parts, result.metrics)

        return super().train_one(batch, mean, outputs)


class MetricsOfTheLastMicrobatch(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        last = {}

        def watched(part, computed):
            result = loss(part, computed)
            last.update(result.metrics)
            return result

        metrics = super().train_one(batch, watched, outputs)
        return {**metrics, **last}


class MeanOfMeans(OneLossSpec):
    """Gives every micro-batch the same weight in the mean, however many tokens it has."""

    def train_one(self, batch, loss, outputs):
        def even(part, computed):
            result = loss(part, computed)
            metrics = {
                name: Metric.mean(metric.as_numbers(name)[name]) if metric.kind == "mean" else metric
                for name, metric in result.metrics.items()
            }
            return LossResult(result.loss, metrics)

        return super().train_one(batch, even, outputs)


class MetricsOfTheFirstMicrobatchsNames(OneLossSpec):
    """Loses a metric that only a later micro-batch has."""

    def train_one(self, batch, loss, outputs):
        known = []

        def watched(part, computed):
            result = loss(part, computed)
            known.append(result.metrics.keys())
            return LossResult(result.loss, {n: m for n, m in result.metrics.items() if n in known[0]})

        return super().train_one(batch, watched, outputs)


class FirstLossSpecOnly(FSDPEngine):
    def train(self, loss_specs):
        return super().train(loss_specs[:1])


class UpdateForEachLossSpec(FSDPEngine):
    """Makes two optimizer updates instead of one."""

    def train(self, loss_specs):
        return combine(super(UpdateForEachLossSpec, self).train([loss_spec]) for loss_spec in loss_specs)


class AverageTheWrongWay(FSDPEngine):
    def update_ema(self, source, decay):
        super().update_ema(source, 1 - decay)


class SplitSequenceGroups(FSDPEngine):
    def _plan(self, batch, outputs=()):
        return super()._plan(replace(batch, units={}, unit_index=None))


class SequenceGroupsByPosition(FSDPEngine):
    """Selects the values of sequence groups by position instead of by group."""

    def _rounds(self, batch, loss_spec):
        for part, place, counts in super()._rounds(batch, loss_spec):
            cut = {key: value[: len(part.unit_rows)] for key, value in batch.units.items()}
            yield replace(part, units=cut), place, counts


class GradientNotCleared(FSDPEngine):
    def setup(self, model, role, settings):
        super().setup(model, role, settings)
        for optimizer in self._optimizers:
            optimizer.zero_grad = lambda set_to_none=True: None


class OptimizerStateNotSaved(FSDPEngine):
    def save(self, folder):
        write_checkpoint(folder, checkpoint_state(self._parameters, (), self._updates))

    def load(self, folder):
        read_checkpoint(folder, checkpoint_state(self._parameters, (), self._updates))


class RandomStateNotRestored(FSDPEngine):
    def load(self, folder):
        state = torch.get_rng_state()
        super().load(folder)
        torch.set_rng_state(state)


class SnapshotThatSharesMemory(FSDPEngine):
    """Copies nothing, so that it writes the later state of the engine."""

    def snapshot(self):
        return self.save


class SnapshotOfTheFirstTime(FSDPEngine):
    """Keeps the first snapshot's memory with its content."""

    def snapshot(self):
        self._taken = getattr(self, "_taken", None) or super().snapshot()
        return self._taken


class SnapshotWithoutTheOptimizer(FSDPEngine):
    """Copies only the parameters."""

    def snapshot(self):
        write = super().snapshot()
        self._snapshot["optimizer"] = self._state()["optimizer"]
        return write


class SnapshotWithALaterRandomState(FSDPEngine):
    def snapshot(self):
        super().snapshot()
        return lambda folder: write_checkpoint(folder, {**self._snapshot, "random": self._state()["random"]})


class SnapshotThatTakesNothing(FSDPEngine):
    def snapshot_size(self):
        return 0


class ExportWithoutTheLastUpdate(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        self._stale = [(name, tensor.clone()) for name, tensor in self.named_full_parameters()]
        return super().train_one(batch, loss, outputs)

    def export(self, folder):
        write_model(folder, self._ready().model, self._reference, iter(self._stale))


class ReferenceThatLearns(FSDPEngine):
    def setup(self, model, role, settings):
        super().setup(model, ACTOR if role == REFERENCE_ROLE else role, settings)


class ReferenceThatIgnoresTraining(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        return super().train_one(batch, loss, outputs) if self._role.trains else {"loss": Metric.mean(0.0)}


class EntropyOfTheWrongSign(FSDPEngine):
    def _compute(self, part, place, outputs):
        computed = super()._compute(part, place, outputs)
        return {**computed, "entropy": -computed["entropy"]} if "entropy" in computed else computed


class EntropyWithoutTemperature(FSDPEngine):
    def _compute(self, part, place, outputs):
        computed, module = super()._compute(part, place, outputs), self._ready()
        temperature, module.temperature = module.temperature, 1.0
        plain = super()._compute(part, place, outputs)
        module.temperature = temperature
        return {**computed, **{name: plain[name] for name in plain if name == "entropy"}}


class ClippedNormReported(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        metrics = super().train_one(batch, loss, outputs)
        limit = self._config.max_gradient_norm
        if limit is not None:
            (norm,) = metrics["gradient_norm"].as_numbers("norm").values()
            metrics["gradient_norm"] = Metric.mean(min(norm, limit))
        return metrics


class ForwardInOrderOfMicrobatches(FSDPEngine):
    def forward(self, batch, outputs):
        order = [row for rows in self._plan(batch).microbatches for row in rows]
        places = batch.with_tokens(at=torch.arange(batch.token_count)).select(order)["at"]
        return {name: values[places] for name, values in super().forward(batch, outputs).items()}


class NonFiniteGradientApplied(FSDPEngine):
    def _update(self, rate):
        for parameter in self._parameters.values():
            parameter.grad.nan_to_num_(1.0)
        return super()._update(rate)


class MomentumWithoutWeights(FSDPEngine):
    """Makes an optimizer step even if the gradient is 0."""

    def _update(self, rate):
        for parameter in self._parameters.values():
            parameter.grad.add_(1e-12)
        return super()._update(rate)


class KeysOfOtherSequences(FSDPEngine):
    """Selects fields of sequences by position instead of by sequence."""

    def _rounds(self, batch, loss_spec):
        for part, place, counts in super()._rounds(batch, loss_spec):
            yield (
                part.with_sequences(**{key: value[: len(part)] for key, value in batch.sequences.items()}),
                place,
                counts,
            )


class TiedParametersTwice(FSDPEngine):
    def named_full_parameters(self):
        yield from super().named_full_parameters()
        yield "lm_head.weight", self._ready().head.weight.detach()


class DescribesWithoutTheHead(FSDPEngine):
    def named_meta_parameters(self):
        return ((name, value) for name, value in super().named_meta_parameters() if "head" not in name)


class ParametersOfTheStart(OneLossSpec):
    """Uses parameters of before the last update in `forward`."""

    def train_one(self, batch, loss, outputs):
        self._before = {name: p.detach().clone() for name, p in self._parameters.items()}
        return super().train_one(batch, loss, outputs)

    @torch.no_grad()
    def forward(self, batch, outputs):
        current = {name: p.detach().clone() for name, p in self._parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.copy_(getattr(self, "_before", current)[name])
        outputs_by_name = super().forward(batch, outputs)
        for name, parameter in self._parameters.items():
            parameter.copy_(current[name])
        return outputs_by_name


class BatchChangedInPlace(OneLossSpec):
    def train_one(self, batch, loss, outputs):
        batch["advantages"].mul_(0.5)
        return super().train_one(batch, loss, outputs)


class ComparedWithMirroredBeta(FSDPEngine):
    """Computes the divergence with 1 - β."""

    def _compute(self, part, place, outputs):
        mirrored = {name: mirror(name) for name in outputs}
        computed = super()._compute(part, place, list(mirrored.values()))
        return {name: computed[other] for name, other in mirrored.items()}


def mirror(name):
    head, _, beta = name.rpartition(":")
    return f"{head}:{1 - float(beta)}" if head else name


class ComparedWithoutAGradient(FSDPEngine):
    def _compute(self, part, place, outputs):
        computed = super()._compute(part, place, outputs)
        return {name: value.detach() + 0 * value if ":" in name else value for name, value in computed.items()}


class ComparedWithNegatedGradient(FSDPEngine):
    """Gives the right values, but negated gradients."""

    def _compute(self, part, place, outputs):
        computed = super()._compute(part, place, outputs)
        return {name: 2 * value.detach() - value if ":" in name else value for name, value in computed.items()}


class ComparedWithItself(FSDPEngine):
    """Overwrites the frozen engine's parameters with those of the engine that learns."""

    @torch.no_grad()
    def compare_with(self, engines):
        super().compare_with(engines)
        for other in engines.values():
            for own, parameter in zip(self._ready().model.parameters(), other._ready().model.parameters(), strict=True):
                parameter.copy_(own)


LOGPROBS = "test_logprobs_are_of_the_tempered_distribution"
ENTROPY = "test_entropy_is_of_the_tempered_distribution"
GRADIENT = "test_the_gradient_is_that_of_the_whole_loss"
ADD_UP = "test_micro_batches_add_up"
KINDS = "test_metrics_are_combined_by_their_kind"
GROUPS = "test_sequence_groups_stay_whole"
DIVERGENCE = "test_a_divergence_matches_its_definition"
LOSS_SPECS = "test_several_loss_specs_are_one_update"
REFERENCE = "test_a_reference_never_learns"
CHECKPOINT = "test_a_checkpoint_continues_bit_for_bit"
SNAPSHOT = "test_a_snapshot_is_of_its_moment"
TOPS = "test_top_logprobs_are_those_of_the_tokens_in_the_batch"
MUTANTS = [
    (MomentumWithoutWeights, "test_an_update_without_loss_weights_changes_nothing", "no token counts moved"),
    (ComparedWithMirroredBeta, DIVERGENCE, "at beta 0.0 differs from its formula"),
    (ComparedWithoutAGradient, DIVERGENCE, "the gradient's norm is"),
    (ComparedWithNegatedGradient, "test_training_on_a_divergence_lowers_it", "the divergence went from"),
    (ComparedWithItself, DIVERGENCE, "at beta 0.0 differs from its formula"),
    (FirstLossSpecOnly, LOSS_SPECS, "loss is"),
    (UpdateForEachLossSpec, LOSS_SPECS, "loss is"),
    (AverageTheWrongWay, "test_an_ema_follows_its_target", "after a step"),
    (TopLogprobsOfTheTokensBefore, TOPS, "loss is"),
    (TopLogprobsWithoutAGradient, TOPS, "gradient_norm is"),
    (SquaresOfTheSampledToken, "test_sum_pi_squared_matches_its_definition", "differs from its formula"),
    (OffByOneShift, LOGPROBS, "logprobs differs from a plain forward pass"),
    (OffByOneShift, "test_a_single_token_has_the_right_gradient", "by automatic differentiation"),
    (PaddingCountedInTheLoss, GRADIENT, "by automatic differentiation"),
    (PaddingCountedInTheLoss, "test_the_loss_sees_every_token_once", "the loss saw"),
    (SequencesSeeEachOther, LOGPROBS, "logprobs differs from a plain forward pass"),
    (SequencesSeeEachOther, "test_a_critic_learns_values", "changes the values at"),
    (TemperatureIgnored, LOGPROBS, "at temperature 0.7: logprobs differs"),
    (TemperatureIgnored, GRADIENT, "at temperature 0.7 loss"),
    (MeanOverMicrobatches, ADD_UP, "loss is"),
    (MeanGradientWithSummedLoss, ADD_UP, "gradient_norm is"),
    (MetricsOfTheLastMicrobatch, ADD_UP, "tokens is"),
    (MeanOfMeans, KINDS, "logprob is"),
    (MetricsOfTheFirstMicrobatchsNames, ADD_UP, "metrics differ"),
    (SplitSequenceGroups, GROUPS, "was split"),
    (SequenceGroupsByPosition, GROUPS, "values of another one"),
    (GradientNotCleared, "test_each_update_has_its_own_gradient", "of equal updates"),
    (OptimizerStateNotSaved, CHECKPOINT, "is the optimizer's state saved"),
    (RandomStateNotRestored, CHECKPOINT, "random state was not restored"),
    (SnapshotThatSharesMemory, SNAPSHOT, "snapshot 1 after further training"),
    (SnapshotOfTheFirstTime, SNAPSHOT, "snapshot 2 after further training"),
    (SnapshotWithoutTheOptimizer, SNAPSHOT, "snapshot 1: metrics are"),
    (SnapshotWithALaterRandomState, SNAPSHOT, "snapshot 1: the random state differs"),
    (SnapshotThatTakesNothing, "test_a_snapshot_reports_its_memory", "a snapshot takes 0 bytes"),
    (ExportWithoutTheLastUpdate, "test_an_export_is_the_model_after_the_last_update", "export differs"),
    (ReferenceThatLearns, REFERENCE, "a frozen role has learned"),
    (ReferenceThatIgnoresTraining, REFERENCE, "raised no error"),
    (EntropyOfTheWrongSign, ENTROPY, "entropy differs from a plain forward pass"),
    (EntropyWithoutTemperature, ENTROPY, "at temperature 0.7: entropy differs"),
    (ClippedNormReported, "test_the_gradient_norm_is_that_before_clipping", "with clipping at 0.001"),
    (ForwardInOrderOfMicrobatches, "test_micro_batches_keep_the_order_of_a_batch", "changes or reorders values"),
    (NonFiniteGradientApplied, "test_a_gradient_that_is_not_finite_changes_nothing", "was not skipped"),
    (KeysOfOtherSequences, "test_the_loss_sees_every_token_once", "is that of other sequences"),
    (TiedParametersTwice, "test_parameters_are_named_as_in_the_files", "names differ"),
    (DescribesWithoutTheHead, "test_parameters_are_named_as_in_the_files", "where named_full_parameters has"),
    (ParametersOfTheStart, "test_training_lowers_the_loss", "forward does not use the updated parameters"),
    (BatchChangedInPlace, "test_the_batch_stays_as_it_was", "changed the batch"),
]


@pytest.mark.parametrize(("mutant", "test", "message"), MUTANTS, ids=lambda value: getattr(value, "__name__", "of"))
def test_a_broken_engine_fails_its_test(mutant, test, message, tmp_path):
    suite = TestCorrectEngine()
    suite.engine_type = mutant
    with pytest.raises(AssertionError, match=message):
        getattr(suite, test)(tmp_path)
