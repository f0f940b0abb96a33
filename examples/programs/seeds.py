"""Run a config with several seeds, one run after the other.

python seeds.py grpo/addition steps=20 --seeds 0 1 2 --output seeds [--dry-run]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from areal_core.config import resolve
from areal_core.programs import add_request_arguments, execute, read_request, require_place


def main(words: list[str]) -> int:
    """Run each seed, or only print its plan; return the first exit code that is not 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_request_arguments(parser)
    parser.add_argument("--seeds", nargs="+", type=int, required=True, help="seeds of the runs")
    parser.add_argument("--output", type=Path, required=True, help="folder of the run folders")
    parser.add_argument("--dry-run", action="store_true", help="print the plans, and start nothing")
    arguments = parser.parse_intermixed_args(words)
    require_place("the folder of the runs", arguments.output, "choose another: --output FOLDER")
    request = read_request(arguments)
    for seed in arguments.seeds:
        resolved = resolve(request.config, request.plugins, [*request.overrides, f"seed={seed}"])
        run_dir = arguments.output / f"seed-{seed}"
        code = execute(resolved, run_dir=run_dir, dry_run=arguments.dry_run)
        if code:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
