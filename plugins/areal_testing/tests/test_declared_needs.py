"""The suites' batches have the columns that a component declares in `needs`, and no others."""

from __future__ import annotations

import pytest

from areal_core.data import Metric
from areal_core.interfaces.algorithm import LossResult
from areal_core.sdk import CRITIC, REFERENCE, ForwardPass, LossSpec
from areal_testing.conformance import (
    AdvantageSuite,
    AuxiliaryLossSuite,
    BatchTransformSuite,
    LossAggregationSuite,
    RegularizerSuite,
)

NEEDED = ForwardPass(REFERENCE, "entropy", "reference_entropy"), ForwardPass(CRITIC, "values", "former_values")


def advantage(batch):
    return batch["reward"][batch.tokens.row_index] - batch["former_values"] - 0.01 * batch["reference_entropy"]


def transform(batch, context):
    return {"doubt": batch["reference_entropy"] * batch["loss_mask"]}


def loss_aggregation(minibatch):
    certain = minibatch["loss_mask"] / (1 + minibatch["reference_entropy"].abs())
    return certain / minibatch["loss_mask"].sum().clamp(min=1)


def regularizer(terms):
    return terms.logprobs * terms.columns["reference_entropy"], {}


def auxiliary_loss(minibatch, context):
    def loss(batch, outputs):
        error = (
            (outputs["values"] - batch["former_values"] - batch["reference_entropy"])
            .square()
            .where(batch["loss_mask"], 0.0)
        )
        return LossResult((error * batch["loss_weights"]).sum(), {"error": Metric.mean(error, batch["loss_mask"])})

    return LossSpec(CRITIC.name, minibatch, ("values",), loss)


for part in (advantage, transform, loss_aggregation, regularizer, auxiliary_loss):
    part.needs = lambda updates: NEEDED  # type: ignore[attr-defined]


def undeclared(column):
    return (
        (AdvantageSuite, lambda batch: batch["reward"][batch.tokens.row_index] - batch[column]),
        (LossAggregationSuite, lambda minibatch: minibatch["loss_mask"] * minibatch[column].exp()),
        (RegularizerSuite, lambda terms: (terms.logprobs * terms.columns[column], {})),
        (BatchTransformSuite, lambda batch, context: {"doubt": batch[column] * batch["loss_mask"]}),
    )


@pytest.mark.parametrize("column", ["values", "reference_logprobs", "proximal_logprobs", "actor_logprobs"])
def test_undeclared_columns_are_missing(column):
    for suite, part in undeclared(column):
        case = suite()
        case.make = lambda part=part: part
        names = [name for name in dir(case) if name.startswith("test_")]
        with pytest.raises(KeyError, match=column):
            getattr(case, names[0])()


class TestAdvantage(AdvantageSuite):
    component = f"{__file__}:advantage"


class TestTransform(BatchTransformSuite):
    component = f"{__file__}:transform"


class TestLossAggregation(LossAggregationSuite):
    component = f"{__file__}:loss_aggregation"


class TestRegularizer(RegularizerSuite):
    component = f"{__file__}:regularizer"


class TestAuxiliaryLoss(AuxiliaryLossSuite):
    component = f"{__file__}:auxiliary_loss"
