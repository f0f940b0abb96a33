"""Runs from Python: from scripts, notebooks and standard input."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

from areal_core import open_run, train
from areal_core.errors import ConfigError, RunError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Workplace

pytestmark = pytest.mark.slow

REWARD = """
import math as mathematics
MOST = 8
def count(text):
    return sum(character.isdigit() for character in text)
def digits(completion):
    return mathematics.sqrt(count(completion) / MOST)
"""
SMALL = """{
    'model': {'path': 'model'}, 'dataset': [{'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(9)],
    'sampling': {'max_new_tokens': 8}, 'rollout': {'batch_size': 2, 'group_size': 2},
}"""
TRAIN = f"""
import areal_core
run = areal_core.train({SMALL}, rewards=[digits], algorithm='grpo', steps=STEPS, run_dir='run')
"""


def python(workplace: Workplace, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code from standard input, or words that name a script."""
    environment, folder = workplace.environment, workplace.folder
    return subprocess.run(
        [sys.executable, *words], input=code, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_a_script_without_a_main_guard_and_the_run_that_it_makes(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(
        f"{REWARD}open('executed', 'a').write('once ')\n{TRAIN.replace('STEPS', '2')}\n"
        "open('returned', 'a').write('once ')\nprint(run.resume(steps=3))\n"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (workplace.folder / "returned").read_text() == "once ", "only the program itself passes the call"
    assert "step 2/2" in done.stdout, "progress is shown"
    run = open_run(workplace.folder / "run")
    assert repr(run) in done.stdout
    assert run.status == "done"
    assert run.metrics["step"] == [1, 2, 3]
    assert run.model == workplace.folder.resolve() / "run" / "model"
    with pytest.raises(RunError, match="set evaluation"):
        _ = run.best
    written = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert written["rewards"][0]["type"] == f"{workplace.folder.resolve()}/script.py:digits"
    samples = run.samples()
    assert {row["prompt"] for row in samples} <= {f"{n}+1=" for n in range(9)}
    assert all(row["prompt"] == f"{row['data_row']}+1=" and row["answer"] for row in samples)
    assert [row["rewards"] for row in samples] == [{"digits": row["reward"]} for row in samples]
    trained = run.samples(1)
    assert len(trained) >= 1
    assert set(trained["step"]) == {1}
    assert set(trained["version"]) == {0}


@pytest.mark.nightly
def test_the_old_form_is_complete_by_itself(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(
        f"{REWARD}\nif __name__ == '__main__':\n"
        "    import yaml\n"
        "    from areal_core.library import train\n"
        "    config = yaml.safe_load(open('run.yaml'))\n"
        "    plugins = config.pop('plugins')\n"
        "    config['steps'] = 1\n"
        "    config['rewards'] = [digits, {'type': 'parts.py:digits', 'name': 'again'}]\n"
        "    train(config, plugins=plugins, run_dir='run')\n"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 0, done.stdout + done.stderr
    written = yaml.safe_load((workplace.folder / "run" / "config.yaml").read_text())
    assert [reward["type"] for reward in written["rewards"]] == [
        f"{workplace.folder}/script.py:digits",
        f"{workplace.folder}/parts.py:digits",
    ]
    assert written["sampling"]["max_new_tokens"] == 8
    assert len(workplace.metrics()) == 1


def test_mistakes_name_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has seen the file that it writes, and its lines say nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train({"algorithm": "grpo", "rollout": {"batchsize": 3}, "rewards": [lambda completion: 1.0]})
    message = str(caught.value)
    assert "problems in train()\n" in message
    assert "rollout.batchsize: unknown key\n" in message
    assert ".yaml" not in message
    assert not list(tmp_path.rglob("*.py")), "nothing is left of a run that did not start"
    assert not list(tmp_path.glob("runs/*"))
    with pytest.raises(UsageError, match="is not a run folder"):
        open_run(tmp_path)


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.nightly),
        signal.SIGTERM,
        pytest.param(signal.SIGKILL, marks=pytest.mark.nightly),
    ],
)
def test_a_program_that_is_asked_to_end_leaves_a_checkpoint(workplace: Workplace, number: signal.Signals) -> None:
    (workplace.folder / "script.py").write_text(f"{REWARD}{TRAIN.replace('STEPS', '100000')}")
    program = subprocess.Popen(
        [sys.executable, "script.py"], cwd=workplace.folder, env=workplace.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    workplace.wait_for(lambda: len(workplace.metrics()) > 1, program)
    os.kill(program.pid, number)
    out, err = program.communicate(timeout=600)
    run = open_run(workplace.folder / "run")
    while run.status == "running":  # of a killed program the run ends a moment later
        pass
    assert run.status == "interrupted", out + err
    assert list(run.folder.glob("attempts/1/checkpoints/step-*"))
    assert program.returncode == {signal.SIGINT: -2, signal.SIGTERM: 143, signal.SIGKILL: -9}[number]


@pytest.mark.nightly
def test_a_function_from_standard_input_is_carried_by_the_run(workplace: Workplace) -> None:
    done = python(workplace, f"{REWARD}{TRAIN.replace('STEPS', '1')}", "-")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len([*(workplace.folder / "run" / "functions").glob("digits-*.pickle")]) == 1
    again = python(workplace, f"{REWARD}{TRAIN.replace('STEPS', '2')}", "-")
    assert "the run folder run exists already" in again.stderr, "a script that is run again mixes no two experiments"
    resumed = workplace.areal("run", "--resume", "run", "steps=2")
    assert resumed.code == 0, resumed.err


def notebook(workplace: Workplace, *cells: str) -> str:
    """Everything that the cells of a notebook write."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": workplace.folder}}
    )
    client.execute(env=workplace.environment)
    return "".join(output.get("text", "") for cell in book.cells for output in cell.outputs)


@pytest.mark.nightly
def test_a_notebook_and_its_functions_with_all_that_they_use(workplace: Workplace) -> None:
    held = "class Held:\n    worth = 0\nheld = Held()\ndef own(completion):\n    return digits(completion) + held.worth"
    out = notebook(
        workplace,
        REWARD,
        held,
        TRAIN.replace("digits", "own").replace("STEPS", "1"),
        "print(run)",
        "print(run.metrics)",
    )
    assert "step 1/1" in out
    assert "reward/all_episodes" in out
    run = open_run(workplace.folder / "run")
    assert repr(run) in out
    source = next(run.folder.glob("functions/own-*.py")).read_text()
    assert "def count(text):" in source
    assert "MOST = 8" in source


def test_what_a_notebook_cannot_hand_on_is_reported(workplace: Workplace) -> None:
    mine = (
        "import areal_core, threading\nlock = threading.Lock()\n"
        "def held(completion): return float(lock.locked())\n"
        "try:\n    areal_core.train(model='model', dataset=[], rewards=[held], algorithm='grpo', run_dir='run')\n"
        "except Exception as error:\n    print(error)"
    )
    assert "held cannot be pickled for the processes of the run" in notebook(workplace, mine)
    assert not (workplace.folder / "run").exists()
