"""From the arguments of `train` to a config; nothing is trained."""

from __future__ import annotations

import subprocess
import sys
import threading
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest

from areal_core import Table, train
from areal_core.config import resolve
from areal_core.config.yaml_text import dump
from areal_core.errors import ConfigError
from areal_core.library import Rows
from areal_core.library.rows import write_rows
from areal_core.library.start import _defaults, _written

pytest.importorskip("areal_grpo", reason="the first-party plugins are not installed")


def reward(completion: str) -> float:
    return float(len(completion))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_importing_areal_core_imports_nothing_and_its_library_no_torch() -> None:
    code = (
        "import sys, areal_core; assert 'areal_core.library' not in sys.modules; areal_core.train; "
        "assert not {'torch', 'transformers', 'cloudpickle', 'datasets'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'areal_core' has no attribute 'trian'"):
        __import__("areal_core").trian  # noqa: B018


@pytest.mark.parametrize("algorithm", ["grpo", "grpo/dapo", "finetuning/sft", {"type": "gspo", "corrections": []}])
def test_defaults_make_a_config_whole(algorithm: Any, tmp_path: Path) -> None:
    values = {"model": {"path": "model"}, "dataset": [{"prompt": "a", "completion": "b"}], "algorithm": algorithm}
    preset = _defaults(algorithm)
    if preset == "grpo/defaults":
        values["rewards"] = [reward]
    (tmp_path / "run.yaml").write_text(dump({"preset": preset, **_written(values, tmp_path)}))
    config = resolve("run.yaml", environment={}).config
    assert config.steps == 100
    assert config.inference_engine is None or config.rollout.group_size == 8


def test_an_algorithm_must_be_named_or_a_preset(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm: is required: choose one\n  such as: .*grpo/grpo"):
        train(model="model", dataset=[], rewards=[reward])
    with pytest.raises(
        ConfigError, match=r"no installed plugin has defaults for reward\n(?s:.*)preset='grpo/defaults'"
    ):
        train(model="model", dataset=[], rewards=[reward], algorithm=reward)
    assert list(tmp_path.iterdir()) == []


def test_a_value_is_given_once() -> None:
    with pytest.raises(ConfigError, match=r"given as an argument and in config: steps"):
        train({"steps": 3}, steps=4)
    with pytest.raises(ConfigError, match="run_dir is no part of a config"):
        train({"run_dir": "run"})


def test_a_model_is_named_and_not_given() -> None:
    with pytest.raises(ConfigError, match=r"model: .* a Table cannot be given to them\n  name its folder"):
        train(model=Table([]), dataset=[], rewards=[reward], algorithm="grpo")  # type: ignore[arg-type]


def test_nothing_is_left_if_one_of_several_functions_cannot_be_pickled(tmp_path: Path) -> None:
    lock = threading.Lock()
    rewards = [lambda completion: 1.0, lambda completion: float(lock.locked())]
    with pytest.raises(ConfigError, match="cannot be pickled"):
        train(model="model", dataset=[], rewards=rewards, algorithm="grpo", run_dir="run")
    assert not (tmp_path / "run").exists()


def test_a_run_folder_is_not_used_twice(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match=r"run exists already\n  .*open_run\('run'\)\.resume\(\)"):
        train({"algorithm": "grpo"}, run_dir="run")


def test_what_a_config_cannot_hold_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a config holds texts, .* and functions, not \{1, 2\}"):
        _written({"steps": {1, 2}}, tmp_path)


def test_rows_may_be_those_of_a_data_set_of_hugging_face(tmp_path: Path) -> None:
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "2+2=", "answer": "4"}]
    for given in (rows, pytest.importorskip("datasets").Dataset.from_list(rows)):
        chosen = _written({"dataset": given, "evaluation": {"dataset": "grpo/additions"}}, tmp_path)
        assert [*Rows(chosen["dataset"]["path"])] == rows
        assert (chosen["dataset"]["type"], chosen["evaluation"]["dataset"]) == (
            "areal_core.library:Rows",
            "grpo/additions",
        )
    with pytest.raises(ConfigError, match=r"row 1 .*of what JSON can hold, and bytes: object is neither"):
        _written({"dataset": [{"prompt": "a"}, {"prompt": object()}]}, tmp_path)
    with pytest.raises(ConfigError, match="the key 7 is int, and keys are text"):
        _written({"dataset": [{"prompt": "a", "scores": [{7: 1}]}]}, tmp_path)
    with pytest.raises(ConfigError, match=r"row 0 .*\(1, 2\) is a tuple, which JSON makes a list: write a list"):
        _written({"dataset": [{"prompt": "a", "answers": [{"right": (1, 2)}]}]}, tmp_path)
    splits = pytest.importorskip("datasets").DatasetDict({"train": given, "test": given})
    with pytest.raises(ConfigError, match=r"dataset: has the splits train, test: take one, as dataset\['train'\]"):
        _written({"dataset": splits}, tmp_path)


def test_a_table_of_hugging_face_gives_what_files_of_parquet_give() -> None:
    datasets, images = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    messages = [{"role": "user", "content": "hi", "name": "ann"}, {"role": "assistant", "content": "hello"}]
    columns = {"messages": [messages], "day": [date(2026, 1, 2)], "took": [timedelta(1)], "gap": [None]}
    table = datasets.Dataset.from_dict({**columns, "image": [images.new("RGB", (2, 2))]})
    table = table.cast_column("image", datasets.Image())
    for given in (table, table.to_iterable_dataset()):
        chosen = write_rows(given)
        rows = Rows(chosen["path"], chosen["notes"])
        row = dict(rows[0])
        assert row.pop("image")["bytes"].startswith(b"\x89PNG")
        assert row == {"messages": messages, "day": "2026-01-02", "gap": None}
        assert "column 'took' holds durations, which no row can carry: it is left out" in "".join(rows.notes())
        assert "column 'day' holds dates, as ISO text" in rows.notes()


@pytest.mark.parametrize("kind", ["numpy", "torch", "pandas", "arrow"])
def test_the_format_of_a_table_changes_no_row(kind: str) -> None:
    row = {"prompt": "a", "n": 1, "items": [{"a": 1}, {"b": 2}]}
    table = pytest.importorskip("datasets").Dataset.from_list([row])
    for given in (table.with_format(kind), table.to_iterable_dataset().with_format(kind)):
        assert [*Rows(write_rows(given)["path"])] == [row]
    assert [*Rows(write_rows(table.with_format(kind, columns=["prompt", "n"]))["path"])] == [{"prompt": "a", "n": 1}]


def test_nulls_in_rows_of_dictionaries_are_the_users_own() -> None:
    rows = [{"prompt": "a", "schema": {"default": None}, "raw": b"\0\xff"}]
    path = Path(write_rows(rows)["path"])
    assert [*Rows(str(path))] == rows
    assert path.stat().st_mode & 0o777 == 0o600
