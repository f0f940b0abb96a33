"""Compare areal with TRL, verl and OpenRLHF, and write the figures as JSON.

    make others     # makes their environment, runs this program in it, and writes the page of the docs

The environment has none of areal's plugins installed: this program takes them from its checkout.
"""

from __future__ import annotations

import argparse
import json
import os
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
    from trainers import Trainer

SEEDS = 3
OUTPUT = ROOT / "docs" / "reference" / "other_implementations.json"
QUIET = {
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}
TRAINER_TOLERANCES = {"loss": 2e-5, "norm": 2e-5, "parameters": 1e-3}
"""AdamW divides by the root of a mean square: where a gradient is all rounding, a parameter may move differently."""
DISTRIBUTIONS = {"TRL": "trl", "verl": "verl", "OpenRLHF": "openrlhf"}


def main() -> int:
    """Compare, write, and return 1 if a comparison fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON (default: the one of the docs)")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    os.environ |= QUIET
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as models:
        make_importable(Path(folder))
        import torch
        from cases import CASES
        from samples import SHAPES
        from trainers import TRAINERS, UPDATES, compared, make_models
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        torch.set_num_threads(1)
        functions = [measured(case) for case in CASES]
        make_models(Path(models))
        trainers = [trained(case, compared(case, Path(models))) for case in TRAINERS]
    found = {
        "versions": {name: version(distribution) for name, distribution in DISTRIBUTIONS.items()},
        "minutes": round((time.monotonic() - began) / 60, 1),
        "samples": SEEDS * len(SHAPES),
        "updates": UPDATES,
        "functions": functions,
        "trainers": trainers,
    }
    arguments.output.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    problems = [row for row in functions + trainers if row["problem"]]
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
    return {
        **described(case, case.other, case.function, max(value, gradient) / case.tolerance),
        "value": digits(value),
        "largest_value": digits(largest_value),
        "gradient": digits(gradient) if largest_gradient else None,
        "largest_gradient": digits(largest_gradient) if largest_gradient else None,
    }


def trained(case: Trainer, differences: dict[str, float]) -> dict[str, Any]:
    """Return the row of a comparison of trainers."""
    largest = max(differences[name] / tolerance for name, tolerance in TRAINER_TOLERANCES.items())
    function = f"{case.kind.__name__} on {case.rows}"
    figures = {name: digits(difference) for name, difference in differences.items()}
    return {**described(case, "TRL", function, largest), **figures}


def described(case: Case | Trainer, other: str, function: str, difference: float) -> dict[str, str]:
    """Return what both kinds of rows have.

    Args:
        case: The comparison.
        other, function: Library and function.
        difference: In multiples of what is rounding.
    """
    kind, _, component = case.component.partition(" ")
    problem = ""
    if not difference <= 1 and not case.differs:
        problem = f"differs by {difference:.3g} times the tolerance"
    if difference <= 1 and case.differs:
        problem = "does not differ any more"
    row = {"kind": kind, "component": component, "other": other, "function": function}
    return {**row, "differs": case.differs, "note": case.note, "problem": problem}


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
