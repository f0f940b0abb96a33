"""Compare areal with TRL, verl and OpenRLHF, and write the figures as JSON.

    make others     # makes their environment, runs this program in it, and writes the page of the docs

The environment has none of areal's plugins installed: this program takes them from its checkout.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkout import ROOT, make_importable

if TYPE_CHECKING:
    import torch
    from cases import Case

SEEDS = 3
OUTPUT = ROOT / "docs" / "reference" / "other_implementations.json"
DISTRIBUTIONS = {"TRL": "trl", "verl": "verl", "OpenRLHF": "openrlhf"}


def main() -> int:
    """Compare, write, and return 1 if a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON (default: the one of the docs)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        make_importable(Path(folder))
        import torch
        from cases import CASES
        from samples import SHAPES

        torch.set_num_threads(1)
        rows = [measured(case) for case in CASES]
    found = {
        "versions": {name: version(distribution) for name, distribution in DISTRIBUTIONS.items()},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "samples": SEEDS * len(SHAPES),
        "functions": rows,
    }
    arguments.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    problems = [row for row in rows if row["problem"]]
    for row in problems:
        print(f"{row['component']} / {row['other']}, {row['function']}: {row['problem']}", file=sys.stderr)
    return 1 if problems else 0


def measured(case: Case) -> dict[str, Any]:
    """Return the row of a case: the largest differences over all seeds and shapes."""
    from samples import sample

    value = gradient = largest_value = largest_gradient = 0.0
    for seed in range(SEEDS):
        for shape in case.shapes:
            (ours, our_gradients), (theirs, their_gradients) = (
                differentiated(compute, sample(seed, shape)) for compute in (case.ours, case.theirs)
            )
            value = max(value, float((ours - theirs).abs().max()))
            largest_value = max(largest_value, float(theirs.abs().max()))
            gradient = max(gradient, float((our_gradients - their_gradients).abs().max()))
            largest_gradient = max(largest_gradient, float(their_gradients.abs().max()))
    difference = max(value, gradient)
    problem = ""
    if not difference <= case.tolerance and not case.differs:
        problem = f"differs by {difference:.1e}, more than {case.tolerance:.0e}"
    if difference <= case.tolerance and case.differs:
        problem = "does not differ any more"
    return {
        "kind": case.component.partition(" ")[0],
        "component": case.component.partition(" ")[2],
        "other": case.other,
        "function": case.function,
        "value": digits(value),
        "largest_value": digits(largest_value),
        "gradient": digits(gradient) if largest_gradient else None,
        "largest_gradient": digits(largest_gradient) if largest_gradient else None,
        "differs": case.differs,
        "note": case.note,
        "problem": problem,
    }


def differentiated(compute: Any, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a side computes of a sample, padded or a scalar, and its gradients by all leaves, [leaves, T]."""
    import torch

    result = compute(given)
    if len(result.shape) == 1 and len(result) == given.batch.token_count:
        result = given.pad(result)
    gradients = [torch.zeros_like(leaf) for leaf in given.leaves]
    if result.requires_grad:
        parts = torch.autograd.grad(result, given.leaves, allow_unused=True)
        gradients = [zero if part is None else part for part, zero in zip(parts, gradients, strict=True)]
    return result.detach().double(), torch.stack(gradients)


def digits(number: float) -> float:
    """Return one significant digit: more of a rounding error would change from machine to machine."""
    return float(f"{number:.0e}")


if __name__ == "__main__":
    sys.exit(main())
