"""Real runs of two gloo ranks with installed plugins that stop them and add metrics, one of them malicious."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from areal_core.runs import RunFolder

if TYPE_CHECKING:
    from tests.integration.conftest import Workplace

pytestmark = pytest.mark.slow
PAGE = (Path(__file__).parents[2] / "docs" / "extend" / "hooks.md").read_text(encoding="utf-8")
GUARD = re.findall(r"```python\n# areal_reward_guard/plugin.py\n(.*?)```", PAGE, re.DOTALL)[0]
NAMES = ("step", "time", "reward/mean", "reward/all_episodes", "time/step_s", "version", "batch/tokens")
EVIL = f"""
from areal_core.plugins import hookimpl

@hookimpl
def areal_add_metrics(metrics):
    metrics["reward/mean"] = -7.0
    return dict.fromkeys({NAMES}, -7.0)
"""
PARTS = f"""
from areal_core.workflows.settings import SingleTurnSettings
from areal_core.workflows.single_turn import SingleTurn

calls = 0

def collapses(completion):
    global calls
    calls += 1
    return 1.0 if calls <= 16 * 8 else 0.0

class Evil(SingleTurn):
    Config = SingleTurnSettings

    async def run_episode(self, row, context):
        episode = await super().run_episode(row, context)
        episode.metrics = dict.fromkeys({NAMES}, -7.0)
        return episode
"""


def install(site: Path, name: str, code: str) -> None:
    """Write a plugin as a distribution, with the metadata that pip would write."""
    package, metadata = site / f"areal_{name}", site / f"areal_{name}-1.0.dist-info"
    package.mkdir(parents=True)
    metadata.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(code)
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: areal-{name}\nVersion: 1.0\nRequires-Dist: areal-core>=0.1\n"
    )
    (metadata / "entry_points.txt").write_text(f"[areal.plugins]\n{name} = areal_{name}.plugin\n")


@pytest.mark.nightly
def test_two_ranks_stop_after_the_same_step_and_no_name_overwrites_a_metric(workplace: Workplace) -> None:
    install(workplace.folder / "site", "reward_guard", GUARD)
    install(workplace.folder / "site", "evil", EVIL)
    path = workplace.environment.get("PYTHONPATH", "")
    workplace.environment["PYTHONPATH"] = f"{workplace.folder / 'site'}:{path}"
    (workplace.folder / "parts.py").write_text(PARTS)
    done = workplace.areal(
        "run", "run.yaml", "run_dir=run", "steps=100", 'rewards=["parts.py:collapses"]', "workflow=parts.py:Evil",
        "launcher.trainer_processes=2", "--plugins", "reward_guard,evil",
    )  # fmt: skip
    assert done.code == 0, done.out + done.err
    metrics = workplace.metrics()
    steps = len(metrics)
    assert 5 < steps < 100
    assert [line["step"] for line in metrics] == [*range(1, steps + 1)]
    reason = (
        rf"step {steps}: the run stopped before its last step: the mean reward of 5 steps fell from 1\.00 to 0\.\d\d"
    )
    assert re.search(rf"{reason} \(plugin 'reward_guard'\)", done.out + done.err)
    assert f"done: {steps} steps in" in done.out + done.err
    status = workplace.areal("status", "run")
    assert status.code == 0
    assert f"done  step {steps} of 100" in status.out
    assert re.search(reason, status.out)
    assert json.loads(workplace.areal("status", "run", "--json").out)["checkpoint"] == steps
    assert workplace.areal("audit", "run").code == 0
    attempt = RunFolder(workplace.folder / "run").last_attempt
    assert attempt is not None
    assert str(attempt.outcome) == f"done {steps}"
    assert (workplace.folder / "run/report.html").is_file()
    assert len(workplace.weights()) > 0
    for line in metrics:
        own = {name: line[name] for name in NAMES if name in line}
        assert -7.0 not in own.values()
        assert {f"evil/{name}" for name in NAMES} <= line.keys()
        assert {name for name in line if line[name] == -7.0} <= {
            *(f"evil/{name}" for name in NAMES), *(f"workflow/{name}" for name in NAMES),
        }  # fmt: skip
    assert any(line.get("workflow/reward/mean") == -7.0 for line in metrics)
    assert all(line["time/hooks_s"] >= 0 for line in metrics[1:])

    # A resume continues: the guard needs five steps before it stops the run again.
    more = workplace.areal("run", "--resume", "run", f"steps={steps + 2}")
    assert more.code == 0, more.out + more.err
    assert [line["step"] for line in workplace.metrics()] == [*range(1, steps + 3)]
    assert f"the run is done, with all its {steps + 2} steps" in "".join(
        (again := workplace.areal("run", "--resume", "run", f"steps={steps + 2}")).out + again.err
    )
