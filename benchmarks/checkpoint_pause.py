"""Seconds that training waits for a checkpoint: written while training waits, and while it goes on, in turns.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint_pause.py [--rounds 5] [--hidden 512] [--folder FOLDER]

The checkpointer, the ledger and the training engine of a run without rollouts: Qwen3 in float32, AdamW, one rank. In
each round one checkpoint of either kind is begun, and train steps are made until it is committed. Medians are printed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from areal_core.config.sections import CheckpointSection
from areal_core.data import PackedBatch, Ragged
from areal_core.disk import tree_size
from areal_core.engines import ModelReference, OptimizerSettings
from areal_core.ledger.store import Ledger
from areal_core.sdk import ACTOR, LossResult, LossSpec
from areal_core.training.checkpointer import Checkpointer
from areal_core.training.metrics_logger import SilentMetricsLogger
from areal_core.training.state import TrainerState
from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCABULARY, TOKENS = 8192, 512


class Commits:
    """A source of no batches: its ledger, and what training waited since the last look."""

    def __init__(self, run_dir: Path) -> None:
        self._ledger = Ledger(run_dir / "attempts/1/ledger", run_dir)
        self.waited_s = 0.0

    def commit(self, step: int, folder: Path) -> None:
        """See `BatchSource.commit`."""
        self._ledger.commit(step, folder, 0)

    @contextmanager
    def phase(self, _: str) -> Iterator[None]:
        """Training waits."""
        began = time.perf_counter()
        yield
        self.waited_s += time.perf_counter() - began


def make_engine(folder: str, hidden: int) -> FSDPEngine:
    """Of a model with random weights."""
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=6,
        num_attention_heads=hidden // 64, num_key_value_heads=2, head_dim=64, max_position_embeddings=128,
        tie_word_embeddings=True,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    engine = FSDPEngine(FSDPConfig())
    engine.setup(ModelReference(folder), ACTOR, OptimizerSettings(1000, 1.0))
    return engine


def train(engine: FSDPEngine) -> float:
    """Seconds of one update."""
    ids = torch.arange(TOKENS) % VOCABULARY
    batch = PackedBatch(Ragged(torch.full((TOKENS // 64,), 64), {"input_ids": ids, "targets": ids}))
    began = time.perf_counter()
    engine.train([LossSpec("actor", batch, ("logprobs",), lambda _, outputs: LossResult(-outputs["logprobs"].sum()))])
    return time.perf_counter() - began


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--folder", type=Path, help="where checkpoints are written, on the disk that is to be measured")
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        run_dir = Path(folder) / "run"
        engine, source = make_engine(f"{folder}/model", arguments.hidden), Commits(run_dir)
        checkpoints = run_dir / "attempts/1/checkpoints"
        rest: Any = ({"actor": engine}, source, SilentMetricsLogger(source.phase))
        savers = {
            k: Checkpointer(CheckpointSection(asynchronous=k), run_dir, checkpoints, *rest) for k in (False, True)
        }
        alone = median(train(engine) for _ in range(5))
        waits: dict[bool, list[float]] = {False: [], True: []}
        beside: list[float] = []
        for step in range(1, 2 * arguments.rounds + 1):
            kind = step % 2 == 0
            source.waited_s = 0.0
            savers[kind].save(TrainerState(step), is_last=False)
            while savers[kind].is_writing:
                beside.append(train(engine))
                savers[kind].poll()
            waits[kind].append(source.waited_s)
        size = tree_size(next(checkpoints.iterdir())) / 2**20
        before, first, after = median(waits[False]), waits[True][0], median(waits[True][1:])
        print(f"checkpoints of {size:,.0f} MiB; training waits {before:.3f} s for one while it is written,")
        print(f"{after:.3f} s where it goes on ({after / before:.3f} of it; {first:.3f} s the first time)")
        print(f"a train step takes {alone:.3f} s alone, {median(beside):.3f} s beside the writing")
    return 0


if __name__ == "__main__":
    sys.exit(main())
