"""A weight transport of somebody else's, and the engine that understands it: both by import, in a true run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.architecture.test_public_names import private_imports

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Workplace

pytestmark = pytest.mark.nightly

TRANSPORT = """
from dataclasses import replace
from pathlib import Path

from areal_core.config import select
from areal_core.engines import WeightUpdate
from areal_core.processes import Done, Message
from areal_core.servers import ServerFleet
from safetensors.torch import save_file

CHOSEN = {chosen!r}
HF = select("inference_engines", "hf/hf")


class Parcel(Message):
    '''Weights lie here; answered with `Done`.'''

    folder: Path


class Parcels:
    '''Sends weights in a folder of its own.'''

    def __init__(self, engine, rollouts):
        self.engine, self.rollouts = engine, rollouts

    def send(self, version, trained):
        tensors = dict(self.engine.named_full_parameters())
        if self.rollouts is not None:
            folder = Path(__file__).parent / f"parcel-{{version}}"
            folder.mkdir(exist_ok=True)
            save_file({{name: value.contiguous() for name, value in tensors.items()}}, folder / "model.safetensors")
            self.rollouts.call(Parcel(folder))
            self.rollouts.wait(self.rollouts.sync_weights(version, trained))
        return False


class Engine(ServerFleet):
    '''Takes parcels.'''

    Config = type(HF.settings)

    def __init__(self, settings, log_dir, member=None, gpus=None):
        super().__init__(HF.load()(settings), log_dir, member, gpus)
        if CHOSEN:
            self.capabilities = replace(self.capabilities, transports=frozenset({{CHOSEN}}))

    async def answer(self, message):
        if not isinstance(message, Parcel):
            return await super().answer(message)
        self.parcel = message.folder
        return Done()

    async def update_weights(self, update):
        folder = update.path or self.parcel
        await super().update_weights(WeightUpdate(update.version, folder))
"""


def write(folder: Path, *, takes: bool) -> list[str]:
    file = folder / "parcels.py"
    file.write_text(TRANSPORT.format(chosen=f"{file}:Parcels" if takes else ""))
    return [f"inference_engine={file}:Engine", f"weight_sync.transport={file}:Parcels"]


def test_it_is_written_with_public_names(tmp_path: Path):
    write(tmp_path, takes=True)
    assert list(private_imports(tmp_path / "parcels.py")) == []


def test_weights_by_a_transport_of_ones_own(workplace: Workplace, tmp_path: Path):
    words = [*write(tmp_path, takes=True), "steps=3", "evaluation=null", "weight_sync.logprob_check_every=1"]
    run_dir = tmp_path / "run"
    done = workplace.areal("run", "run.yaml", f"run_dir={run_dir}", *words)
    assert done.code == 0, done.err
    assert len(list(tmp_path.glob("parcel-*"))) >= 2
    assert not list((run_dir / "attempts").rglob("version-*")), "nothing went through a folder of ours"


def test_an_engine_that_does_not_know_it_is_refused(workplace: Workplace, tmp_path: Path):
    done = workplace.areal("run", "run.yaml", f"run_dir={tmp_path / 'run'}", *write(tmp_path, takes=False))
    assert done.code != 0
    assert "does not support with its current settings" in done.err
