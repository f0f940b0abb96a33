"""Compute a step of a run again on this machine, and show what each sample has contributed to its loss.

The step is computed from the tokens that the run has kept, in one process, without servers. Nothing in the run changes.
KEY=VALUE shows what another setting would have made of the same samples: algorithm.policy_loss=grpo/reinforce.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from areal_core.cli.output import print_error, print_out
from areal_core.cli.request import require_folder
from areal_core.errors import UsageError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator

    from areal_core.config import Resolved
    from areal_core.runs.replay import Replay

SUMMARY = "compute a step of a run again, and show what each sample contributed"
SHOWN: Final = 10
"""Samples in the table, those with the largest share of the loss."""
COLUMNS: Final = {
    "group": 7,
    "sample": 6,
    "reward": 8,
    "advantage": 9,
    "trained": 7,
    "versions": 11,
    "ratio": 8,
    "loss": 10,
    "share": 6,
}
"""Columns of the table, and their widths."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `areal replay`."""
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the run folder")
    parser.add_argument("changes", metavar="KEY=VALUE", nargs="*", help="settings that differ from the run's")
    parser.add_argument("--step", metavar="N", type=int, required=True, help="the step, from 1 as in metrics.jsonl")
    parser.add_argument("--json", action="store_true", help="print all samples as JSON, with the values of each token")


def execute(arguments: argparse.Namespace) -> int:
    """Replay the step and print it. Return 0."""
    require_folder(arguments.run_dir)
    import json

    from areal_core.runs.replay import replay
    from areal_core.runtime.folder import RunFolder
    from areal_core.runtime.status import IN_PROGRESS, run_status

    run_dir = arguments.run_dir.resolve()
    state = run_status(RunFolder(run_dir))["state"]
    if state in IN_PROGRESS:
        raise UsageError(f"the run in {run_dir} is {state}: its ledger cannot be read before it ends")
    if wrong := [change for change in arguments.changes if "=" not in change]:
        raise UsageError(f"{wrong[0]!r} is not a setting: write section.key=value")
    found, resolved = replay(
        run_dir, arguments.step, arguments.changes, lambda step: print_error(f"step {step} of {arguments.step}")
    )
    folder = _write(run_dir, found, resolved, arguments.changes)
    if arguments.json:
        summary = {"step": found.step, "begin": found.begin, "difference": found.difference, "metrics": found.metrics}
        print_out(json.dumps({**summary, "samples": [_with_tokens(found, row) for row in found.samples()]}))
        return 0
    origin = f"the checkpoint of step {found.begin}" if found.begin else "the initial model"
    print_out(f"step {found.step}, computed again from {origin}")
    if found.difference is not None:
        print_out(f"parameters after the step: at most {found.difference:.3g} from those of the run's checkpoint")
    for line in _differences(run_dir, found) if not arguments.changes else ():
        print_out(line)
    for line in _table(found.samples()):
        print_out(line)
    print_out(f"tokens: areal view {folder}   values: --json")
    return 0


def _differences(run_dir: Path, found: Replay) -> Iterator[str]:
    """Yield a line for each metric of the step that the run has written with another value."""
    from areal_core.runtime.folder import RunFolder

    written = next((line for line in RunFolder(run_dir).read_metrics() if line.get("step") == found.step), {})
    for name in ("train/loss", "train/gradient_norm"):
        there, here = written.get(name), found.metrics.get(name, math.nan)
        if there is not None and not math.isclose(there, here, rel_tol=0.01, abs_tol=1e-6):
            yield (
                f"not what the run computed: {name} is {here:.4g} here and {there:.4g} in metrics.jsonl; its config, "
                "code or data may have changed since"
            )


def _table(rows: list[dict[str, Any]]) -> list[str]:
    count = len(rows)
    heading = f"the {count} samples, those" if count <= SHOWN else f"the {SHOWN} of {count} samples"
    return [
        f"{heading} with the largest shares of the loss:",
        " ".join(f"{name:>{width}}" for name, width in COLUMNS.items()),
        *(" ".join(f"{_cell(row[name]):>{width}}" for name, width in COLUMNS.items()) for row in rows[:SHOWN]),
    ]


def _cell(value: Any) -> str:
    """Return a value in four digits, the range of versions as `3-4`, and nothing for None."""
    if isinstance(value, list):
        return "-".join(map(str, dict.fromkeys(value)))
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _with_tokens(found: Replay, row: dict[str, Any]) -> dict[str, Any]:
    """Return a sample with the values of its tokens. A value stands at the position before its token."""
    start, end = found.batch.tokens.offsets[row["row"] : row["row"] + 2].tolist()
    values = {name: values[start:end].tolist() for name, values in found.batch.tokens.values.items()}
    return {**row, "values": {name: [_finite(value) for value in listed] for name, listed in values.items()}}


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _write(run_dir: Path, found: Replay, resolved: Resolved, changes: list[str]) -> Path:
    """Write a folder that `areal view` shows like a run of this one step."""
    import json

    from areal_core.runtime.folder import RunFolder

    name = f"step-{found.step:06d}"
    if changes:
        name += "-" + hashlib.blake2b("\n".join(changes).encode(), digest_size=3).hexdigest()
    folder = run_dir / "replays" / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    run, own = RunFolder(run_dir), RunFolder(folder)
    own.config.write_text(resolved.to_yaml())
    if run.model_note.is_file():
        shutil.copyfile(run.model_note, own.model_note)
    own.metrics.write_text(json.dumps({"step": found.step, **found.metrics}) + "\n")
    resolved.plugins.events.log = print_error
    resolved.plugins.events.batch_logged(folder, found.step, found.batch)
    return folder
