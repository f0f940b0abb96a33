"""Real runs whose evaluations run beside training, held open by a file, killed in the middle and resumed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

    from conftest import Workplace

pytestmark = pytest.mark.slow

HANG_S = 300
PARTS = """\
import asyncio
from pathlib import Path

from areal_core.workflows.settings import SingleTurnSettings
from areal_core.workflows.single_turn import SingleTurn


class Held:
    '''Episodes of evaluations wait for a file.'''

    def __init__(self, gate: str) -> None:
        self._gate, self._inner = Path(gate), SingleTurn(SingleTurnSettings())

    async def run_episode(self, row, context):
        while context.is_evaluation and not self._gate.exists():
            await asyncio.sleep(0.01)
        return await self._inner.run_episode(row, context)


def digits(completion):
    return sum(character.isdigit() for character in completion) / 8
"""


def words_of(workplace: Workplace, *words: str) -> list[str]:
    (workplace.folder / "parts.py").write_text(PARTS)
    return [
        "run", "run.yaml", "run_dir=run", "steps=6", "checkpoint.every=2", f"workflow.gate={workplace.folder}/gate",
        "workflow.type=parts.py:Held", "evaluation.dataset.type=grpo/additions", "evaluation.limit=10",
        "evaluation.every=2", "evaluation.at_start=false", "checkpoint.asynchronous=false", *words,
    ]  # fmt: skip


def committed(workplace: Workplace) -> int:
    audit = workplace.areal("audit", "run", "--json")
    return int(json.loads(audit.out)["committed_step"]) if audit.code == 0 else 0


def evaluated(workplace: Workplace) -> list[tuple[int, bool]]:
    return [(line["step"], "evaluation/reward" in line) for line in workplace.metrics()]


def hidden(workplace: Workplace) -> list[str]:
    return [path.name for path in (workplace.folder / "run").iterdir() if path.name.startswith(".best")]


def kill(workplace: Workplace, process: subprocess.Popen[str]) -> None:
    """End a run without a word; its processes notice."""
    left = workplace.processes(process)
    process.kill()
    process.communicate()
    deadline = time.monotonic() + HANG_S
    while any(is_alive(number) for number in left):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_alive(number: int) -> bool:
    try:
        return bool(Path(f"/proc/{number}/cmdline").read_bytes())
    except OSError:
        return False


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_in_the_middle_it_is_made_once_with_the_right_weights(workplace: Workplace, ranks: int) -> None:
    words: Sequence[str] = words_of(workplace, f"launcher.trainer_processes={ranks}")
    process = workplace.start(*words)
    workplace.wait_for((workplace.folder / "run/attempts/1/checkpoints/step-000002").exists, process)
    workplace.wait_for(lambda: committed(workplace) == 2, process)
    assert evaluated(workplace) == [(1, False)]
    assert hidden(workplace) == [".best.new"], "the weights of step 2, should they be the best"
    kill(workplace, process)
    assert workplace.areal("audit", "run").code == 0
    (workplace.folder / "gate").touch()
    done = workplace.areal("run", "--resume", "run", "--allow-changes")
    assert done.code == 0, done.err
    assert evaluated(workplace) == [(step, step % 2 == 0) for step in range(1, 7)]
    assert workplace.areal("audit", "run").code == 0
    assert hidden(workplace) == []
    scores = {line["step"]: line["evaluation/reward"] for line in workplace.metrics() if line["step"] % 2 == 0}
    best = json.loads((workplace.folder / "run/best/evaluation.json").read_text())
    assert best["evaluation/reward"] == max(scores.values()) == scores[best["step"]]


@pytest.mark.nightly
def test_asked_to_stop_while_it_runs_the_run_loses_no_step(workplace: Workplace) -> None:
    process = workplace.start(*words_of(workplace))
    log = workplace.folder / "run/logs/trainer-0.log"
    workplace.wait_for(lambda: log.is_file() and "waiting for the evaluation" in log.read_text(), process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=HANG_S)
    assert process.returncode == 143, err
    assert "the evaluation of step 2 was given up: step 3 has been trained already" in out + err
    assert committed(workplace) == 3
    assert evaluated(workplace) == [(1, False), (2, False), (3, False)]
    (workplace.folder / "gate").touch()
    done = workplace.areal("run", "--resume", "run", "--allow-changes")
    assert done.code == 0, done.err
    assert evaluated(workplace) == [(1, False), (2, False), (3, False), (4, True), (5, False), (6, True)]
    assert workplace.areal("audit", "run").code == 0
    assert hidden(workplace) == []
