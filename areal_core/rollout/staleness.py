"""How far generation may run ahead of training, and how stale a token is when it is trained on.

The unit is one trained batch. A token's staleness is the number of batches trained before the one that consumes it,
less the number trained when the weights that sampled it were synced.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from areal_core.config.sections import RolloutSection


@dataclass(slots=True)
class AdmissionCounts:
    """Where the prompt groups of a run are. Failed, filtered and dropped groups are in none of these terms.

    Attributes:
        running: groups whose episodes are under way.
        ready: finished groups that wait to be consumed.
        consumed: groups handed to the trainer, as whole batches.
        trained: batches that were trained when the weights now generating were synced.
    """

    running: int = 0
    ready: int = 0
    consumed: int = 0
    trained: int = 0


def capacity(bound: RolloutSection, counts: AdmissionCounts) -> int:
    """How many more groups may be admitted now, so that, consumed in order, none is over the bound on staleness.

    With B groups in a batch and t batches trained:
    `min(max_pending_batches * B - (running + ready), (max_staleness + t + 1) * B - (consumed + ready + running))`.
    A budget on staleness fills up, so the depth is a setting of its own. May be negative after a bound was lowered.
    """
    under_way = counts.running + counts.ready
    depth = bound.max_pending_batches * bound.batch_size - under_way
    lead = (bound.max_staleness + counts.trained + 1) * bound.batch_size - (counts.consumed + under_way)
    return min(depth, lead)
