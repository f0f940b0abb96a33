"""Episodes per second through AReaL's own executor, beside ours (`rollout_controller.py`), in turns.

    pip download --no-deps areal==1.0.4 && unzip -d AREAL areal-1.0.4-*.whl
    python benchmarks/areal_executor.py --areal AREAL [--libraries SITE] [--rounds 3] [--sizes 256 1024]

`WorkflowExecutor.prepare_batch` with a workflow that returns at once what one generation of `--tokens` tokens leaves:
the six tensors that AReaL's own workflows return. It keeps nothing on disk; ours makes every batch durable first.
The wheel is taken without its dependencies: those that its import asks for and that neither this environment nor
`--libraries` holds are replaced by empty modules, which the output names.
"""

from __future__ import annotations

import argparse
import importlib.abc
import importlib.machinery
import re
import statistics
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

HERE = Path(__file__).parent


class Nothing:
    """Stands for whatever is taken from a module that is not here."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __call__(self, *words: Any, **names: Any) -> Any:
        """As a decorator, what it decorates."""
        return words[0] if len(words) == 1 and callable(words[0]) and not names else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __getitem__(self, _: object) -> Any:
        return self


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty modules in place of packages that are not here."""

    def __init__(self, names: set[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """A module of one of these packages."""
        if name.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """One whose every attribute is nothing."""
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(Nothing(), name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """It has no code."""


def import_executor(areal: Path, libraries: Path | None) -> tuple[Any, Any, set[str]]:
    """AReaL's executor, its settings, and the packages it had to do without."""
    sys.path.insert(0, str(areal))
    sys.path += [str(libraries)] if libraries else []
    # Not importable beside other releases of antlr4, and used for command lines only.
    absent = Absent({"hydra"})
    sys.meta_path.insert(0, absent)
    while True:
        try:
            from areal.api.cli_args import InferenceEngineConfig  # type: ignore[import-not-found]
            from areal.infra.workflow_executor import WorkflowExecutor  # type: ignore[import-not-found]
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package == "areal" or package in absent.names:
                raise
            absent.names.add(package)
            for name in [name for name in sys.modules if name.partition(".")[0] == "areal"]:
                del sys.modules[name]
        else:
            return WorkflowExecutor, InferenceEngineConfig, absent.names


class Versions:
    """An inference engine that has a version and is asked for nothing else."""

    def __init__(self) -> None:
        self.version = 0

    def get_version(self) -> int:
        """Of the weights."""
        return self.version


class OneGeneration:
    """The cheapest workflow: what one answer leaves, at once."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    async def arun_episode(self, engine: Versions, data: dict[str, Any]) -> dict[str, Any]:
        """As AReaL's own workflow for one turn returns it, [1, T] each."""
        import torch

        prompt, answer = [1, 2, 3, 4], list(range(self._tokens))
        row = {
            "input_ids": prompt + answer,
            "loss_mask": [0] * len(prompt) + [1] * len(answer),
            "logprobs": [0.0] * len(prompt) + [-1.0] * len(answer),
            "versions": [-1] * len(prompt) + [engine.version] * len(answer),
            "attention_mask": [True] * (len(prompt) + len(answer)),
        }
        tensors = {name: torch.tensor(values).unsqueeze(0) for name, values in row.items()}
        return {**tensors, "rewards": torch.tensor([1.0])}


def measure_theirs(arguments: argparse.Namespace) -> None:
    """One line for each size, behind the first batch."""
    executor_class, config_class, absent = import_executor(arguments.areal, arguments.libraries)
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

    print(f"without: {', '.join(sorted(absent))}")
    for size in arguments.sizes:
        engine = Versions()
        config = config_class(
            consumer_batch_size=size, max_concurrent_rollouts=3 * size, max_head_offpolicyness=2, queue_size=None
        )
        executor = executor_class(config, engine)
        executor.initialize()
        rows = [{"row": row} for row in range(100_000)]
        loader = StatefulDataLoader(rows, batch_size=size, collate_fn=list)
        workflow, began = OneGeneration(arguments.tokens), 0.0
        for step in range(arguments.batches + 1):
            batch = executor.prepare_batch(loader, workflow)
            assert len(batch) == size
            began = began or time.perf_counter()
            engine.version = step + 1
        rate = arguments.batches * size / (time.perf_counter() - began)
        executor.destroy()
        print(f"{size:6d} a batch: {rate:8,.0f} episodes/s", flush=True)


def main() -> None:
    """Both in turns, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--areal", type=Path, required=True, help="folder of the unpacked wheel")
    parser.add_argument("--libraries", type=Path, help="a folder with those of its dependencies that are to be had")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--sizes", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--workers", type=int, default=0, help="of ours")
    parser.add_argument("--group-size", type=int, default=1, help="of ours")
    parser.add_argument("--theirs", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.theirs:
        measure_theirs(arguments)
        return
    shared = ["--batches", str(arguments.batches), "--tokens", str(arguments.tokens)]
    shared += ["--sizes", *map(str, arguments.sizes)]
    own = ["--workers", str(arguments.workers), "--group-size", str(arguments.group_size)]
    programs = {
        "areal_core": ["rollout_controller.py", *own],
        "AReaL": ["areal_executor.py", *sys.argv[1:], "--theirs"],
    }
    rates: dict[tuple[str, int], list[float]] = {}
    for _ in range(arguments.rounds):
        for name, (script, *words) in programs.items():
            command = [sys.executable, str(HERE / script), *words, *shared]
            output = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
            found = re.findall(r"(\d+) a batch: +([\d,]+) episodes/s", output.stdout)
            if not found:
                raise SystemExit(f"{name} measured nothing:\n{output.stdout}{output.stderr}")
            for size, rate in found:
                rates.setdefault((name, int(size)), []).append(float(rate.replace(",", "")))
            print(f"{name}: {output.stdout.strip()}", flush=True)
    for size in arguments.sizes:
        ours, theirs = (statistics.median(rates[name, size]) for name in programs)
        print(f"{size} a batch: areal_core {ours:,.0f}, AReaL {theirs:,.0f} episodes/s, {ours / theirs:.2f}x")


if __name__ == "__main__":
    main()
