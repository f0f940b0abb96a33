"""Recipes of tinker-cookbook against `areal tinker serve`: a table of rewards, seconds a step and staleness.

    python benchmarks/tinker_cookbook.py [--lessons 1200] [--steps 40]

The supervised recipe fine-tunes a model over bytes with random weights on sums, of which it then adds some right. From
that checkpoint `math_rl env=arithmetic` trains it, synchronously and asynchronously. The cookbook is unmodified and has
a virtual environment below `~/.cache/areal/servers`, which this program makes once. Eight minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "plugins" / "areal_tinker" / "tests"))  # for the model and the recipes of the tests
MAKER = ROOT / "tests" / "servers_on_cpu" / "make_environment.py"
REWARD, CORRECT, SECONDS = "env/all/reward/total", "env/all/correct", "time/total"
STALENESS = "async/staleness_max"
ENDS = 5
"""Steps at the start and at the end of a run whose mean the table has."""
BATCH = 64
"""Conversations in a step of the supervised recipe."""
RUNS: dict[str, dict[str, Any]] = {"synchronous": {}, "asynchronous": {"max_steps_off_policy": 2}}

if TYPE_CHECKING:
    from recipes import Finished


def ends(done: Finished, name: str) -> str:
    """Return the mean of a metric over the first and over the last steps."""
    values = done.column(name)
    return f"{statistics.mean(values[:ENDS]):.3f} -> {statistics.mean(values[-ENDS:]):.3f}"


def main() -> None:
    """Print the table."""
    from chat_model import make_chat_model
    from recipes import Recipes, write_sums
    from tinker_server import serving

    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--lessons", type=int, default=1200, help="steps of the supervised recipe")
    parser.add_argument("--steps", type=int, default=40, help="steps of each run of math_rl")
    asked = parser.parse_args()
    made = subprocess.run([sys.executable, MAKER, "tinker_cookbook"], check=True, stdout=subprocess.PIPE, text=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_chat_model(folder / "model")
        with serving(folder, model, "--full") as server:
            recipes = Recipes(made.stdout.strip(), server.url, model, folder)
            file = write_sums(folder / "sums.jsonl", asked.lessons * BATCH)
            taught = recipes.supervised("supervised", file, BATCH, learning_rate=3e-3, lr_schedule="linear")
            losses, seconds = taught.column("train_mean_nll"), taught.column("time/step")
            print(f"supervised: {len(losses)} steps, {statistics.median(seconds):.2f} s a step,", end=" ")
            print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}\n", flush=True)
            print("math_rl | reward | correct | seconds a step | steps behind at most\n---|---|---|---|---")
            for label, settings in RUNS.items():
                sizes = {"group_size": 8, "groups_per_batch": 16, "max_steps": asked.steps}
                done = recipes.math_rl(label, taught.checkpoint, learning_rate=2e-4, **sizes, **settings)
                behind = max(row.get(STALENESS, 0) for row in done.rows)
                columns = [ends(done, REWARD), ends(done, CORRECT), f"{statistics.median(done.column(SECONDS)):.2f}"]
                print(" | ".join([label, *columns, str(behind)]), flush=True)


if __name__ == "__main__":
    main()
