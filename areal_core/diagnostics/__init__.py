"""What areal notes about a run: settings that do nothing, before it starts, and known problems that its metrics show.

`areal run` prints each finding once and keeps it in `diagnostics.jsonl`, which `areal status` and `areal view` read.
"""

from areal_core.diagnostics.balance import Split, bottleneck
from areal_core.diagnostics.findings import Watch, read_findings, write_notes
from areal_core.diagnostics.learning import examine

__all__ = ["Split", "Watch", "bottleneck", "examine", "read_findings", "write_notes"]
