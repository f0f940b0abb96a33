"""One process of an evaluation: `python -m areal_evaluation RUN_DIR CONCURRENCY [ADDRESS]`.

CONCURRENCY is how many episodes are under way at a time, 0 for as many as in a run; ADDRESS, as JSON, is that of
somebody else's model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from areal_core.runs import Member, RunFolder, run_role


def main(run_dir: Path, concurrency: int, address: str = "") -> int:
    """Play the episodes; the exit code."""

    def play(member: Member) -> int:
        """What takes long to import is imported when the process beats already."""
        if address:
            from areal_evaluation import address_evaluator
            from areal_evaluation.address import Address

            return address_evaluator.play(RunFolder(run_dir), Address(**json.loads(address)), concurrency, member)
        from areal_evaluation import evaluator

        return evaluator.play(RunFolder(run_dir), concurrency, member)

    return run_role(play)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
