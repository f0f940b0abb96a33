"""Runs from Python: from a script, from a notebook and from standard input."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import yaml

if TYPE_CHECKING:
    from conftest import Workplace

pytestmark = pytest.mark.slow

TRAIN = """
from areal_core.library import train
import yaml
config = yaml.safe_load(open("run.yaml"))
config["steps"] = 1
config["train_engine"]["learning_rate"] = 0.01
plugins = config.pop("plugins")
"""
REWARD = """
import math as mathematics
MOST = 8
def count(text):
    return sum(character.isdigit() for character in text)
def digits(completion):
    return mathematics.sqrt(count(completion) / MOST)
"""


def python(workplace: Workplace, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run code from standard input, or words that name a script."""
    environment, folder = workplace.environment, workplace.folder
    return subprocess.run(
        [sys.executable, *words], input=code, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_a_script_with_a_reward_of_its_own_and_one_by_a_relative_path(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(
        f"{REWARD}\nif __name__ == '__main__':\n"
        + "".join(f"    {line}\n" for line in TRAIN.splitlines())
        + "    config['rewards'] = [digits, {'type': 'parts.py:digits', 'name': 'again'}]\n"
        + "    train(config, plugins=plugins, run_dir='run')\n"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((workplace.folder / "run" / "config.yaml").read_text())
    assert [reward["type"] for reward in written["rewards"]] == [
        f"{workplace.folder}/script.py:digits",
        f"{workplace.folder}/parts.py:digits",
    ]


def test_a_script_without_a_main_guard_is_told_so(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(
        f"{REWARD}{TRAIN}config['rewards'] = [digits]\ntrain(config, run_dir='run')"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 1
    assert "the script calls train() when it is imported" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert not (workplace.folder / "run").exists()


@pytest.mark.slow
def test_standard_input(workplace: Workplace) -> None:
    done = python(workplace, f"{TRAIN}train(config, plugins=plugins, run_dir='run')", "-")
    assert done.returncode == 0, done.stderr
    assert (workplace.folder / "run" / "model").is_dir()


def test_a_function_from_standard_input_has_no_code_that_others_can_read(workplace: Workplace) -> None:
    done = python(workplace, f"{REWARD}{TRAIN}config['rewards'] = [digits]\ntrain(config, run_dir='run')", "-")
    assert done.returncode == 1
    assert "the code of digits cannot be read: it was not read from a file" in done.stderr
    assert "name it: path/to/file.py:digits" in done.stderr


def notebook(workplace: Workplace, *cells: str) -> str:
    """Everything that the cells of a notebook write."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    client = nbclient.NotebookClient(
        book, timeout=600, kernel_name="python3", resources={"metadata": {"path": workplace.folder}}
    )
    client.execute(env=workplace.environment)
    return "".join(output.get("text", "") for cell in book.cells for output in cell.outputs)


@pytest.mark.slow
def test_a_notebook_and_its_functions_with_all_that_they_use(workplace: Workplace) -> None:
    words = "config['rewards'] = [digits]\nprint('folder', train(config, plugins=plugins, run_dir='run'))"
    out = notebook(workplace, REWARD, TRAIN, words)
    assert "folder run" in out
    assert (workplace.folder / "run" / "model").is_dir()


def test_what_a_notebook_cannot_hand_on_is_told(workplace: Workplace) -> None:
    message = "try:\n    train(config, run_dir='run')\nexcept Exception as error:\n    print(error)"
    mine = "lock = open('run.yaml')\ndef held(completion): return float(lock.closed)\nconfig['rewards'] = [held]"
    assert "held uses lock, a TextIOWrapper of this session" in notebook(workplace, TRAIN, mine, message)
    wrong = "config['rewards'] = [digits]\nconfig['stepz'] = 1"
    assert "stepz: unknown key" in notebook(workplace, REWARD, TRAIN, wrong, message)
