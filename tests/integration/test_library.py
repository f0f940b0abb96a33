"""Runs from Python: from a script, from a notebook and from standard input."""

from __future__ import annotations

import subprocess
import sys
from datetime import date, timedelta
from typing import TYPE_CHECKING

import pytest
import yaml

from areal_core.errors import ConfigError
from areal_core.library import Rows, _named, train

if TYPE_CHECKING:
    from pathlib import Path

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
        + "    config['dataset'] = [{'prompt': f'{n}+1=', 'answer': str(n + 1)} for n in range(9)]\n"
        + "    train(config, plugins=plugins, run_dir='run')\n"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((workplace.folder / "run" / "config.yaml").read_text())
    assert [reward["type"] for reward in written["rewards"]] == [
        f"{workplace.folder}/script.py:digits",
        f"{workplace.folder}/parts.py:digits",
    ]


def test_rows_may_be_those_of_a_data_set_of_hugging_face(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    for given in (rows, pytest.importorskip("datasets").Dataset.from_list(rows)):
        chosen = _named({"dataset": given, "evaluation": {"dataset": "grpo/additions"}})
        assert [*Rows(chosen["dataset"]["path"])] == rows
        assert (chosen["dataset"]["type"], chosen["evaluation"]["dataset"]) == (
            "areal_core.library:Rows",
            "grpo/additions",
        )
    with pytest.raises(ConfigError, match=r"row 1 .*of what JSON can hold, and bytes: object is neither"):
        _named({"dataset": [{"prompt": "a"}, {"prompt": object()}]})
    with pytest.raises(ConfigError, match="the key 7 is int, and keys are text"):
        _named({"dataset": [{"prompt": "a", "scores": [{7: 1}]}]})
    splits = pytest.importorskip("datasets").DatasetDict({"train": given, "test": given})
    with pytest.raises(ConfigError, match=r"dataset: has the splits train, test: take one, as dataset\['train'\]"):
        _named({"dataset": splits})


def test_a_table_of_hugging_face_gives_what_files_of_parquet_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets, images = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    messages = [{"role": "user", "content": "hi", "name": "ann"}, {"role": "assistant", "content": "hello"}]
    columns = {"messages": [messages], "day": [date(2026, 1, 2)], "took": [timedelta(1)], "gap": [None]}
    table = datasets.Dataset.from_dict({**columns, "image": [images.new("RGB", (2, 2))]})
    table = table.cast_column("image", datasets.Image())
    for given in (table, table.to_iterable_dataset()):
        chosen = _named({"dataset": given})["dataset"]
        rows = Rows(chosen["path"], chosen["notes"])
        row = dict(rows[0])
        assert row.pop("image")["bytes"].startswith(b"\x89PNG")
        assert row == {"messages": messages, "day": "2026-01-02", "gap": None}
        assert "column 'took' holds durations, which no row can carry: it is left out" in "".join(rows.notes())
        assert "column 'day' holds dates, as ISO text" in rows.notes()


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_the_format_of_a_table_changes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    row = {"prompt": "a", "n": 1, "items": [{"a": 1}, {"b": 2}]}
    table = pytest.importorskip("datasets").Dataset.from_list([row])
    for given in (table.with_format(kind), table.to_iterable_dataset().with_format(kind)):
        assert [*Rows(_named({"dataset": given})["dataset"]["path"])] == [row]
    chosen = _named({"dataset": table.with_format(kind, columns=["prompt", "n"])})
    assert [*Rows(chosen["dataset"]["path"])] == [{"prompt": "a", "n": 1}]


def test_nulls_in_rows_of_dictionaries_are_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path))
    rows = [{"prompt": "a", "schema": {"default": None}, "raw": b"\0\xff"}]
    assert [*Rows(_named({"dataset": rows})["dataset"]["path"])] == rows


def test_what_a_config_cannot_hold_is_told() -> None:
    def reward(completion: str) -> float:
        return 1.0

    with pytest.raises(ConfigError, match=r"^reward in test_what_a_config_cannot_hold_is_told cannot be used"):
        _named({"rewards": [reward]})
    with pytest.raises(ConfigError, match=r"a config holds texts, .* and functions, not \{1, 2\}"):
        _named({"steps": {1, 2}})


def test_mistakes_are_told_as_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has seen the file that it writes, and its lines say nothing."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        train({"rollout": {"batchsize": 3}})
    told = str(caught.value)
    assert "problems in train(config)\n" in told
    assert "\n  train(config): rollout.batchsize: unknown key\n" in told
    assert ".yaml" not in told


def test_a_script_without_a_main_guard_is_told_so(workplace: Workplace) -> None:
    (workplace.folder / "script.py").write_text(
        f"{REWARD}{TRAIN}config['rewards'] = [digits]\ntrain(config, run_dir='run')"
    )
    done = python(workplace, "", "script.py")
    assert done.returncode == 1
    assert "the script calls train() when it is imported" in done.stderr
    assert 'if __name__ == "__main__":' in done.stderr
    assert not (workplace.folder / "run").exists()


@pytest.mark.nightly
def test_standard_input(workplace: Workplace) -> None:
    again = "try:\n    train(config, plugins=plugins, run_dir='run')\nexcept Exception as error:\n    print(error)"
    done = python(workplace, f"{TRAIN}train(config, plugins=plugins, run_dir='run')\nconfig['steps'] = 2\n{again}", "-")
    assert done.returncode == 0, done.stderr
    assert (workplace.folder / "run" / "model").is_dir()
    assert "the run folder run exists already" in done.stdout, "a script that is run again mixes no two experiments"
    assert len(workplace.metrics()) == 1


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
