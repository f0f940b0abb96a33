"""The core's suite for training engines, on one of several ranks; `test_layouts.py` starts them all.

    RANK=0 RANKS=2 STORE=FILE FOLDER=DIR SETTINGS='{"parallel": {"tensor": 2}}' pytest layout_suite.py

All ranks run the same tests in the same order, in the same folders; what is no collective, the first does alone.
"""

import json
import os
from datetime import timedelta
from functools import wraps
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from areal_fsdp.config import FSDPConfig
from areal_fsdp.engine import FSDPEngine
from areal_testing.conformance import TrainEngineSuite, checkpoints, divergence, models, training


@pytest.fixture(scope="session", autouse=True)
def group():
    rank, ranks = int(os.environ["RANK"]), int(os.environ["RANKS"])
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store = dist.FileStore(os.environ["STORE"], ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    yield
    dist.destroy_process_group()


@pytest.fixture
def tmp_path(request):
    """Return the same folder on every rank."""
    folder = Path(os.environ["FOLDER"]) / request.node.name
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    return folder


def by_the_first(function):
    """Wrap a function that writes files, so that only rank 0 calls it and the others wait."""

    @wraps(function)
    def call(*arguments, **named):
        result = function(*arguments, **named) if dist.get_rank() == 0 else None
        dist.barrier()
        return result if result is not None else arguments[0]

    return call


models._SIZES.update(num_attention_heads=4, num_key_value_heads=2)  # which two ranks can divide
for module in (training, checkpoints, divergence):
    if hasattr(module, "make_model"):
        module.make_model = by_the_first(module.make_model)


class TestLayout(TrainEngineSuite):
    def make_engine(self, **settings):
        return FSDPEngine(FSDPConfig(**settings, **json.loads(os.environ["SETTINGS"])))
