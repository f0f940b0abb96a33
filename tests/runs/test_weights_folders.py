"""Where weights are written that servers read."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_core.config import resolve
from areal_core.runs import trainer

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")


@pytest.mark.parametrize(
    ("addresses", "is_shared"),
    [
        (["http://127.0.0.1:30000", "http://localhost:30001", "http://[::1]:30002"], False),
        (["http://127.0.0.1:30000", "http://10.0.0.5:30000"], True),
        (["http://localhost.example.org:30000"], True),
    ],
)
def test_servers_on_other_machines_read_the_runs_folder(
    addresses: list[str], is_shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(trainer.SCRATCH_VARIABLE, str(tmp_path / "scratch"))
    monkeypatch.setattr(trainer, "is_main", lambda: False)
    words = ["inference_engine=sglang", "inference_engine.servers=0", f"inference_engine.addresses={addresses}"]
    config = resolve(None, ["grpo", "sglang"], words).config
    attempt: Any = SimpleNamespace(weights=tmp_path / "run")
    model: Any = None
    expected = [tmp_path / "run"] if is_shared else [tmp_path / "scratch" / "weights", tmp_path / "run"]
    assert trainer._weights_folders(config, attempt, model, in_memory=True) == expected
    assert trainer._weights_folders(config, attempt, model, in_memory=False) == [tmp_path / "run"]
