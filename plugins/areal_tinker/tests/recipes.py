"""Recipes of tinker-cookbook as clients of a server of the Tinker API, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LAUNCHERS = Path(__file__).parent / "launchers"
HANG_S = 900.0
"""Seconds after which a recipe has not ended."""
RENDERER = "role_colon"
TOKENS = {"math_rl": 16, "guess_number": 24}
"""Largest number of tokens, which are bytes, of an answer. Seven of them are the text that ends it."""


def write_sums(file: Path, count: int, *, seed: int = 0) -> Path:
    """Write conversations about sums, in the form of the recipe `math_rl env=arithmetic`, and return the file.

    Args:
        file: the file; one conversation a line.
        count: number of conversations.
        seed: of the sums.
    """
    chance = random.Random(seed)
    pairs = [(chance.randint(0, 100), chance.randint(0, 100)) for _ in range(count)]
    return _write(file, [_sum(first, second, str(first + second)) for first, second in pairs])


def write_sums_and_guesses(file: Path, count: int, instructions: str, *, seed: int = 0) -> Path:
    """Write conversations about sums, three of four of which are answered with a guess, and return the file.

    A guess such as "Guess: 512" has the form of the recipe `guess_number`. It is longer than `math_rl` allows, which
    costs the reward for the format there. One conversation of sixteen is the first turn of `guess_number` itself.

    Args:
        file: the file; one conversation a line.
        count: number of conversations.
        instructions: system message of `guess_number`.
        seed: of the numbers.
    """
    chance = random.Random(seed)
    conversations = []
    for number in range(count):
        guess = f"Guess: {chance.randint(100, 999)}"
        first, second = chance.randint(0, 100), chance.randint(0, 100)
        if number % 16 == 0:
            conversations.append([_message("system", instructions), _message("assistant", guess)])
        else:
            conversations.append(_sum(first, second, guess if number % 4 else str(first + second)))
    return _write(file, conversations)


def _sum(first: int, second: int, answer: str) -> list[dict[str, str]]:
    example = [_message("user", "What is 4 + 5?"), _message("assistant", "9")]
    return [*example, _message("user", f"What is {first} + {second}?"), _message("assistant", answer)]


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _write(file: Path, conversations: list[list[dict[str, str]]]) -> Path:
    file.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in conversations))
    return file


@dataclass(frozen=True)
class Finished:
    """Results of a recipe.

    Attributes:
        output: the end of what it printed.
        rows: its metrics, a row for each training step.
        checkpoint: path of its last state, `tinker://...`.
    """

    output: str
    rows: list[dict[str, Any]]
    checkpoint: str

    def column(self, name: str) -> list[float]:
        """Return a metric of all steps."""
        return [row[name] for row in self.rows]


class Recipes:
    """Recipes of tinker-cookbook, unmodified, as clients of a server.

    Args:
        python: the Python that has tinker-cookbook.
        address: of the server.
        model: folder of the server's model, which has the tokenizer.
        folder: for data, logs and metrics.
    """

    def __init__(self, python: str, address: str, model: Path, folder: Path) -> None:
        self._python = python
        self._address = address
        self._model = model
        self._folder = folder

    def guess_number_instructions(self) -> str:
        """Return the system message of the recipe `guess_number`."""
        code = "from tinker_cookbook.recipes.multiplayer_rl.guess_number import env; print(env.SYSTEM_PROMPT)"
        return subprocess.run([self._python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.strip()

    def supervised(self, name: str, conversations: Path, batch_size: int, **settings: Any) -> Finished:
        """Train on a file of conversations once, and return the metrics.

        Raises:
            RuntimeError: the recipe has failed.
        """
        program = [str(LAUNCHERS / "supervised.py"), str(conversations), str(batch_size)]
        return self._run(name, program, recipe_name=name, **settings)

    def math_rl(self, name: str, checkpoint: str, **settings: Any) -> Finished:
        """Train on the sums of `env=arithmetic` from a checkpoint, and return the metrics.

        Raises:
            RuntimeError: the recipe has failed.
        """
        program = ["-m", "tinker_cookbook.recipes.math_rl.train", "env=arithmetic", "loss_fn=importance_sampling"]
        return self._run(name, program, load_checkpoint_path=checkpoint, max_tokens=TOKENS["math_rl"], **settings)

    def guess_number(self, name: str, checkpoint: str, **settings: Any) -> Finished:
        """Train on a game of several turns from a checkpoint, and return the metrics.

        Raises:
            RuntimeError: the recipe has failed.
        """
        program = [str(LAUNCHERS / "guess_number.py"), "importance_sampling", checkpoint]
        return self._run(name, program, max_tokens=TOKENS["guess_number"], **settings)

    def _run(self, name: str, program: list[str], **settings: Any) -> Finished:
        """Run a recipe to its end without evaluations, and read what it has written."""
        folder = self._folder / name
        always = {"model_name": self._model, "renderer_name": RENDERER, "log_path": folder}
        settings |= always | {"eval_every": 0, "save_every": 0}
        words = [f"{key}={value}" for key, value in settings.items()]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"TINKER_BASE_URL": self._address, "TINKER_API_KEY": "tml-any"}
        environment |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [self._python, *program, *words],
            cwd=self._folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        if done.returncode or "Training completed successfully" not in done.stdout:
            raise RuntimeError(f"the recipe {name} ended with exit code {done.returncode}:\n{done.stdout[-3000:]}")
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        last = json.loads((folder / "checkpoints.jsonl").read_text().splitlines()[-1])
        return Finished(done.stdout[-3000:], [row for row in rows if "loss:sum" in row], last["state_path"])
