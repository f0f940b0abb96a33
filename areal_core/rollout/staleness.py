"""How far generation may run ahead of training: the bound on staleness as arithmetic.

Staleness counts trained batches. A token's staleness is the number of batches trained before the batch that consumes
it, minus the number trained when the weights that sampled it were synced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.config.sections import RolloutSection


@dataclass(slots=True)
class AdmissionCounts:
    """Number of prompt groups by state. Failed, filtered and stale groups are in none of them.

    Attributes:
        running: groups whose episodes run.
        ready: groups that wait to be consumed.
        consumed: groups handed to the trainer, as whole batches.
        trained: batches that were trained when the weights now generating were synced.
    """

    running: int = 0
    ready: int = 0
    consumed: int = 0
    trained: int = 0

    @property
    def admitted(self) -> int:
        """Groups in any state: the next group is number `admitted % batch_size` of batch `admitted // batch_size`."""
        return self.running + self.ready + self.consumed


def capacity(bound: RolloutSection, counts: AdmissionCounts) -> int:
    """Return how many more groups may be admitted so that none, consumed in order, exceeds the bound on staleness.

    With B groups in a batch and t batches trained:
    `min(max_pending_batches * B - (running + ready), (max_staleness + t + 1) * B - (consumed + ready + running))`.
    The second term alone would always fill up to the bound, so the first one, the depth, is a setting of its own.

    Returns:
        Number of groups; negative after a resume with a lower bound.
    """
    under_way = counts.running + counts.ready
    depth = bound.max_pending_batches * bound.batch_size - under_way
    lead = (bound.max_staleness + counts.trained + 1) * bound.batch_size - counts.admitted
    return min(depth, lead)
