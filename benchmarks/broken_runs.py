"""Runs that are broken on purpose, and what `areal doctor RUN` says of each: a table.

    python benchmarks/broken_runs.py FOLDER [--only NAME ...] [--steps 30]

Each run is the demonstration's (`grpo/addition`) with one thing wrong. FOLDER keeps the runs; one that is there is not
repeated. A run takes one to two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REWARDS = '''
"""Rewards with faults."""


def zero(completion):
    """Compare with a text that no answer is: the space is the fault."""
    return float(completion == " ")


def one(completion):
    """Forget to compare."""
    return 1.0


def right(completion, answer):
    """Compare the text behind the working."""
    return float(completion.rpartition("}")[2].strip() == answer)


def brittle(completion, answer):
    """Raise for half of the answers."""
    if completion[-1:] in set("02468"):
        raise ValueError("an even number")
    return right(completion, answer)


def huge(completion, answer):
    """Give a number in cents where the others give dollars."""
    return 1e9 * right(completion, answer)
'''


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        words: settings that make it so.
        question: the question of `areal doctor` that should find it.
    """

    words: tuple[str, ...]
    question: str


FAULTS = {
    "nothing": Fault((), ""),
    "a reward that no answer gets": Fault(
        ('rewards=["rewards.py:zero"]',), "do the answers of a group differ in reward"
    ),
    "a reward that each answer gets": Fault(
        ('rewards=["rewards.py:one"]',), "do the answers of a group differ in reward"
    ),
    "a second reward that is always 0": Fault(
        ('rewards=["rewards.py:right", "rewards.py:zero"]',), "does each reward vary"
    ),
    "a reward that raises": Fault(('rewards=["rewards.py:brittle"]', "rollout.failed_reward=0"), "are episodes scored"),
    "answers cut off": Fault(("sampling.max_new_tokens=3",), "do answers end by themselves"),
    "a warm-up that does not end": Fault(("train_engine.warmup_steps=1000000",), "does the policy move"),
    "a learning rate that is too small": Fault(("train_engine.learning_rate=1e-9",), "does the policy move"),
    "a learning rate that is too large": Fault(("train_engine.learning_rate=0.01",), "does the policy explore"),
    "stale data, and a rate that is too large for it": Fault(
        (
            "rollout.max_pending_batches=12",
            "rollout.max_staleness=12",
            "rollout.stale=keep",
            "train_engine.learning_rate=2e-3",
        ),
        "do sampler and trainer agree",
    ),
    "rewards in the wrong unit": Fault(
        ('rewards=["rewards.py:huge"]', "algorithm.advantage=grpo/group_centered"), "is there a gradient"
    ),
}


def main() -> None:
    """Run what is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args()
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "rewards.py").write_text(REWARDS)
    print("what is broken | found | what `areal doctor` does not call well\n---|---|---")
    for name in asked.only:
        fault, run = FAULTS[name], asked.folder / name.replace(" ", "-")
        words = ["preset=grpo/addition", "evaluation=null", f"steps={asked.steps}", f"run_dir={run}", *fault.words]
        if not (run / "metrics.jsonl").is_file():
            command = [sys.executable, "-m", "areal_core", "run", "--plugins", "grpo", *words]
            with (asked.folder / f"{run.name}.log").open("w") as log:
                subprocess.run(command, cwd=asked.folder, stdout=log, stderr=log, check=False)
        command = [sys.executable, "-m", "areal_core", "doctor", "--json", str(run)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if not done.stdout:
            print(f"{name} | NO | {done.stderr.strip()}", flush=True)
            continue
        wrong = {
            answer["question"]: answer["text"] for answer in json.loads(done.stdout) if answer["is_well"] is not True
        }
        found = "yes" if (fault.question in wrong if fault.question else not wrong) else "NO"
        print(f"{name} | {found} | {'; '.join(f'{question}: {text}' for question, text in wrong.items())}", flush=True)


if __name__ == "__main__":
    main()
