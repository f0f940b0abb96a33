"""The passes that components ask for: columns that models compute before the advantages are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_core.interfaces.algorithm import ForwardPass

if TYPE_CHECKING:
    from collections.abc import Iterable

    from areal_core.data.batch import PackedBatch
    from areal_core.interfaces.algorithm import Context
    from areal_core.interfaces.model import Role


def run_passes(batch: PackedBatch, needs: Iterable[Role | ForwardPass], context: Context) -> PackedBatch:
    """Compute every column that is needed and not there yet, all of a role's in one pass over the batch."""
    wanted: dict[str, dict[str, str]] = {}
    for need in needs:
        if isinstance(need, ForwardPass) and need.column not in batch:
            wanted.setdefault(need.role.name, {})[need.column] = need.output
    for role, columns in wanted.items():
        found = context.forward(role, batch, sorted(set(columns.values())))
        batch = batch.with_tokens(**{column: found[output] for column, output in columns.items()})
    return batch
