"""A server that is killed, and a client that does not notice."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import killed_at
import pytest
from tinker_server import adam, datum

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = len(killed_at.POINTS)


def train(server: Any, steps: int = STEPS) -> list[float]:
    """Train with two passes a step. Return the log-probabilities of a datum afterwards."""
    service = server.connect()
    client = service.create_lora_training_client(base_model=server.model, rank=4).result()
    losses = []
    for step in range(steps):
        passes = [client.forward_backward([datum([step + 4, *range(3, 9)])], "cross_entropy") for _ in range(2)]
        done = client.optim_step(adam())
        losses += [each.result().metrics["loss:sum"] for each in passes]
        assert done.result().metrics["grad_norm"] > 0
    final = client.forward([datum()], "cross_entropy").result()
    return [*losses, *final.loss_fn_outputs[0]["logprobs"].tolist()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: Any, tinker_model: Any) -> list[float]:
    """Losses and log-probabilities that a client sees of a server that is not killed."""
    from tinker_server import serving

    with serving(tmp_path_factory.mktemp("undisturbed"), tinker_model) as server:
        return train(server)


def test_a_server_that_dies_at_each_change_of_state_makes_each_step_once(start_server, tmp_path, undisturbed):
    environment = killed_at.point_file(tmp_path, killed_at.POINTS)
    server = start_server("--save-every", "0", **environment)
    assert train(server) == undisturbed
    assert not (tmp_path / "kills").read_text(), "it has died at each point"
    assert server.log().count("starting again, clients continue") == STEPS


def test_a_server_that_is_started_again_continues(start_server, undisturbed):
    """The driver is killed, too. Nothing is saved before: all calls are repeated."""
    server = start_server()
    result: list[Any] = []
    client = threading.Thread(target=lambda: result.append(train(server)))
    client.start()
    for _ in range(2):
        time.sleep(random.uniform(1, 3))
        server.kill()
        server.start()
    client.join()
    assert result == [undisturbed]
