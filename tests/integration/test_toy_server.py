"""The toy server of the example plugin passes the suite of inference engines; a run starts and restarts it."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from areal_core.servers import ServerFleet
from areal_testing.conformance import InferenceEngineSuite

if TYPE_CHECKING:
    from types import ModuleType

    from conftest import Workplace

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "plugin" / "src" / "areal_example"


def example() -> ModuleType:
    """The adapter's module, as nobody has installed it."""
    specification = importlib.util.spec_from_file_location("toy_adapter", EXAMPLE / "inference_engines.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # pydantic looks names of annotations up there
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def toy_fleet(server_of_each_shape, engine_by_model):
    """Makes fleets of two servers, one for each shape of model."""
    toy = example()
    address_of = server_of_each_shape(toy.ToyAdapter(toy.ToyConfig()))

    def make(folder, update_mode, slots):
        settings = {"servers": 0, "update_mode": update_mode, "max_concurrent_requests": slots}

        def fleet(address):
            return ServerFleet(toy.ToyAdapter(toy.ToyConfig(**settings, addresses=[address])), folder)

        return engine_by_model(fleet, address_of)

    return make


class TestToyServer(InferenceEngineSuite):
    tokens_in_flight = 96  # it computes the whole sequence for each of them

    @pytest.fixture(autouse=True)
    def _with_servers(self, toy_fleet):
        self.make = toy_fleet

    def make_engine(self, folder, *, update_mode, slots):
        return self.make(folder, update_mode, slots)


@pytest.mark.nightly
def test_a_run_starts_it_again_and_goes_on(workplace: Workplace) -> None:
    words = [f"inference_engine.type={EXAMPLE}/inference_engines.py:ToyAdapter", "inference_engine.servers=2"]
    words += ["steps=6", "rollout.batch_size=4", "evaluation.every=100", "run_dir=run"]
    run = workplace.start("run", "--plugins", "grpo", *words)
    workplace.wait_for(lambda: len(workplace.metrics()) > 0, run)
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in workplace.processes(run)}
    servers = [pid for pid, path in commands.items() if b"toy_server.py" in path.read_bytes()]
    assert len(servers) == 2
    os.kill(servers[0], signal.SIGKILL)
    told, said = run.communicate(timeout=600)
    assert run.returncode == 0, said
    assert "restarted" in told
    assert workplace.areal("audit", "run").code == 0
    assert [line["step"] for line in workplace.metrics()][-1] == 6
