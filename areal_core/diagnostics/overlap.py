"""Whether asynchrony gains less than it costs, as far as one run can know.

In a step of s seconds the trainer waits w for a batch, so it is busy for s - w. A batch is in generation for b seconds,
from the start of its first group to the end of its last one, and a weight sync occupies the servers for y. Alone, a
batch takes no longer than it did beside another one and beside training, so that a synchronous step would take at most

    a = (s - w) + y + b    seconds

The samples that are trained on are worth a share u of as many fresh ones. Asynchrony gains less than it costs if
s > u a: groups that are dropped as stale lengthen s, importance weights and masks of stale tokens lower u. That it
gains more is never known: where batches share the servers, b is longer than a batch alone would need.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from areal_core.diagnostics.balance import STEPS, whole_steps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WORTH: Final = "train/effective_sample_share"
BATCH: Final = "time/batch_generation_s"
SYNC: Final = ("weight_sync/pause_s", "weight_sync/transfer_s", "weight_sync/resume_s")


@dataclass(frozen=True, slots=True)
class Overlap:
    """Means over some steps.

    Attributes:
        step: seconds of a whole step.
        synchronous: seconds that a synchronous step would take at most.
        worth: share of as many fresh samples that the samples trained on are worth.
        staleness: of the tokens trained on, in batches.
    """

    step: float
    synchronous: float
    worth: float
    staleness: float

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]], masks_stale: bool, fresh: float) -> Overlap | None:
        """Return the means over the last steps without an evaluation or a checkpoint; None if there are too few.

        Args:
            lines: metrics of the run's steps.
            masks_stale: whether tokens over the bound on staleness are taken out of the loss.
            fresh: `train/effective_sample_share` of a batch without staleness: engines that differ lower it as well.
        """
        latest = whole_steps(lines, 3 * STEPS)
        if len(latest) < 3 * STEPS or not all(BATCH in line and WORTH in line for line in latest):
            return None
        latest = latest[: 2 * STEPS]

        def mean(key: str) -> float:
            return statistics.fmean(line.get(key, 0.0) for line in latest)

        in_loss = mean("batch/sampled_tokens")
        masked = mean("staleness/tokens_over_bound") if masks_stale else 0.0
        kept = in_loss / (in_loss + masked) if masked else 1.0
        training = mean("time/step_s") - mean("time/wait_s")
        return cls(
            step=mean("time/step_s"),
            synchronous=training + sum(map(mean, SYNC)) + mean(BATCH),
            worth=kept * min(1.0, mean(WORTH) / fresh),
            staleness=mean("staleness/mean"),
        )

    def describe(self) -> str:
        """Return what is compared and what to try; nothing where asynchrony may gain more than it costs."""
        if self.step <= self.worth * self.synchronous:
            return ""
        return (
            f"asynchrony gains less than it costs: a step takes {self.step:.3g} s, a synchronous one would take at "
            f"most {self.synchronous:.3g}, and samples that are {self.staleness:.2g} batches old are worth "
            f"{self.worth:.1%} of fresh ones; set rollout.max_staleness=0, or let servers generate more batches at a "
            "time (rollout.max_pending_batches)"
        )
