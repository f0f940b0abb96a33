"""A server of the Tinker API, and recipes of tinker-cookbook as its clients, each in a process of its own."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_core.processes import free_port, http_address, kill_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

LAUNCHERS = Path(__file__).parent / "launchers"
HANG_S = 900.0
"""Seconds after which a server has not started, or a recipe has not ended."""
RENDERER = "role_colon"


@contextmanager
def serving(model: Path, folder: Path) -> Iterator[str]:
    """Serve a model, all of whose parameters are trained, and yield the server's address.

    Args:
        model: folder of the model.
        folder: the server's; it is made.

    Raises:
        RuntimeError: the server has not started.
    """
    port = free_port()
    command = [sys.executable, "-m", "areal_core", "tinker", "serve", "--full", "--plugins", "hf", "--model", model]
    command += ["--port", str(port), "--run-dir", folder, "inference_engine=hf"]
    log = folder.with_name(f"{folder.name}.log")
    address = http_address("127.0.0.1", port)
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + HANG_S
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server has not started; its log:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            kill_tree(process.pid)
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/api/v1/healthz", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def write_additions(file: Path, count: int, *, long_answers: float = 0.0, seed: int = 0) -> Path:
    """Write conversations about sums, in the form of the recipe `math_rl env=arithmetic`, and return the file.

    Args:
        file: the file; one conversation a line.
        count: number of conversations.
        long_answers: share of the conversations whose answer is a sentence without the sum. Answers of the recipe are
            cut before its end, which costs the reward for the format.
        seed: of the sums.
    """
    chance = random.Random(seed)
    with file.open("w") as lines:
        for _ in range(count):
            first, second = chance.randint(0, 100), chance.randint(0, 100)
            is_long = chance.random() < long_answers
            answer = "Let us count on our fingers." if is_long else str(first + second)
            texts = ["What is 4 + 5?", "9", f"What is {first} + {second}?", answer]
            roles = ["user", "assistant"] * 2
            messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return file


@dataclass(frozen=True)
class Finished:
    """What a recipe has left.

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
        return self._run(name, program, load_checkpoint_path=checkpoint, max_tokens=16, **settings)

    def guess_number(self, name: str, checkpoint: str, **settings: Any) -> Finished:
        """Train on a game of several turns from a checkpoint, and return the metrics.

        Raises:
            RuntimeError: the recipe has failed.
        """
        program = [str(LAUNCHERS / "guess_number.py"), "importance_sampling", checkpoint]
        return self._run(name, program, **settings)

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
