"""The weight transport, without servers: `areal_core.engines.WeightTransport` says what happens then."""

import pytest
import torch
from areal_core.engines import TransferFailedError

from areal_example.weight_transports import TimedBroadcast


class OneWeight:
    def named_meta_parameters(self):
        yield "weight", torch.zeros(2, device="meta")


@pytest.fixture
def trainer_of_one_rank():
    if not torch.distributed.is_initialized():  # a training engine in this process may have begun
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)


@pytest.mark.usefixtures("trainer_of_one_rank")
def test_timed_broadcast_fails_as_a_broadcast_does():
    with pytest.raises(TransferFailedError):
        TimedBroadcast(OneWeight(), None).send(version=1, trained=1)
