"""Collective operations and a shared source on two ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow
HANG_S = 120

PROGRAM = """
import json, sys
import torch.distributed as dist
from areal_core.errors import RunError
from areal_core.training import collectives
from areal_core.training.source import Interrupted, SharedSource, TrainingBatch

rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)

class Source:
    def next_batch(self, step):
        if step == 1:
            raise Interrupted
        if step == 2:
            raise RunError("the rollouts failed")
        return b"batch 0"

    def end_evaluation(self, patience_s):
        return {"evaluation/reward": 0.5}

source = SharedSource(Source() if rank == 0 else None, lambda payload: payload.decode())

def next_batch(step):
    try:
        return source.next_batch(step)
    except Interrupted as interruption:
        return f"interrupted: {interruption.failure}"

barrier = collectives.new_barrier()
barrier()
print(json.dumps({
    "is_main": collectives.is_main(),
    "broadcast": collectives.broadcast(1.5 + rank),
    "broadcast_bytes": collectives.broadcast_bytes([b"main", b""][rank]).decode(),
    "nothing": collectives.broadcast_bytes([b"", b"other"][rank]).decode(),
    "broadcast_text": collectives.broadcast_text(["main \\u00e9", "other"][rank]),
    "all_gather": collectives.all_gather(rank),
    "all_gather_text": collectives.all_gather_text(["short", "longer \\u00e9"][rank]),
    "all_empty": collectives.all_gather_text(""),
    "gather_bytes": [payload.decode() for payload in collectives.gather_bytes([b"first", b""][rank])],
    "batches": [next_batch(step) for step in range(3)],
    "metrics": source.end_evaluation(0.0),
}))
collectives.barrier()
dist.destroy_process_group()
"""


def test_two_ranks_get_the_same_and_the_main_one_what_is_gathered(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), store], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    first, second = (json.loads(rank.communicate(timeout=HANG_S)[0]) for rank in ranks)
    everywhere = {
        "broadcast": 1.5,
        "broadcast_bytes": "main",
        "nothing": "",
        "broadcast_text": "main é",
        "all_gather": [0, 1],
        "all_gather_text": ["short", "longer é"],
        "all_empty": ["", ""],
        "metrics": {"evaluation/reward": 0.5},
    }
    failed = "interrupted: the rollouts failed"
    assert first == everywhere | {
        "is_main": True,
        "gather_bytes": ["first", ""],
        "batches": ["batch 0", "interrupted: None", failed],
    }
    assert second == everywhere | {
        "is_main": False,
        "gather_bytes": [],
        "batches": ["batch 0", "interrupted: None", "interrupted: None"],
    }
