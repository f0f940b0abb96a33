"""No preset scolds itself: of a run that learns the diagnostics say nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Workplace

PRESETS = Path(__file__).parents[2] / "plugins/areal_grpo/src/areal_grpo/presets"
NAMES = sorted({path.stem for path in PRESETS.glob("*.yaml")} - {"addition_lessons", "smollm2", "defaults"})

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.nightly) for name in NAMES])
def test_a_preset_learns_and_is_not_scolded(workplace: Workplace, name: str) -> None:
    workplace.environment["AREAL_CACHE"] = str(Path("~/.cache/areal").expanduser())  # making the model takes a minute
    done = workplace.areal("run", f"grpo/{name}", "run_dir=run", "steps=60", "evaluation=null")
    assert done.code == 0, done.err
    assert workplace.metrics()[-1]["reward/all_episodes"] > 0.6
    assert not (workplace.folder / "run/diagnostics.jsonl").exists(), done.out
