from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A process group of this process alone, as the training loop expects one."""
    if dist.is_initialized():  # an engine of another file, in the same process, leaves its group to the end
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
