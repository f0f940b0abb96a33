import json
import os
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal_core.errors import ConfigError
from areal_rewards.config import FilesSettings, HubSettings, JSONLinesSettings
from areal_rewards.tables import FilesDataset, HubDataset, JSONLinesDataset

pytestmark = pytest.mark.slow

ROWS = [
    {"question": "What is 1 + 1?", "solution": "One and one.\n#### 2", "level": 1},
    {"question": "What is 2 + 2?", "solution": "Two and two.\n#### 4", "level": 2},
    {"question": "What is 3 + 3?", "solution": "Three and three.\n#### 6", "level": 3},
]
TEMPLATES = {"prompt": "{question} Explain.", "answer": "{solution}", "answer_after": "####"}


def write(folder, name, rows=ROWS):
    path = folder / name
    if path.suffix == ".jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        pandas = pytest.importorskip("pandas")
        frame = pandas.DataFrame(rows)
        frame.to_csv(path, index=False) if path.suffix == ".csv" else frame.to_parquet(path)
    return path


def lines(paths, **settings):
    return JSONLinesDataset(JSONLinesSettings(paths=paths, **settings))


def files(paths, **settings):
    pytest.importorskip("datasets")
    return FilesDataset(FilesSettings(paths=paths, **settings))


def hub(name, **settings):
    pytest.importorskip("datasets")
    return HubDataset(HubSettings(name=str(name), **settings))


def rows_of(dataset):
    return [dataset[index] for index in range(len(dataset))]


def expected():
    for number, row in enumerate(ROWS, start=1):
        yield {**row, "prompt": f"What is {number} + {number}? Explain.", "answer": str(2 * number)}


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.parquet", "rows.csv"])
def test_files_of_every_format(name, tmp_path):
    assert rows_of(files([write(tmp_path, name)], **TEMPLATES)) == list(expected())


def test_lines_of_json_need_no_library(tmp_path, without):
    without("datasets")
    assert rows_of(lines([write(tmp_path, "rows.jsonl")], **TEMPLATES)) == list(expected())


@pytest.mark.parametrize("read", [lines, files])
def test_several_files_and_a_limit(read, tmp_path):
    paths = [write(tmp_path, "a.jsonl", ROWS[:2]), write(tmp_path, "b.jsonl", ROWS[2:])]
    assert [row["level"] for row in rows_of(read(paths, **TEMPLATES))] == [1, 2, 3]
    assert [row["level"] for row in rows_of(read(paths, limit=2, **TEMPLATES))] == [1, 2]
    assert len(read(paths, limit=9, **TEMPLATES)) == 3


def test_a_row_is_found_by_its_file_and_its_line(tmp_path):
    paths = [write(tmp_path, "a.jsonl", ROWS[:2]), write(tmp_path, "b.jsonl", ROWS[2:])]
    paths[1].write_text("\n" + paths[1].read_text())
    made = lines(paths, **TEMPLATES)
    assert [made.describe_row(index) for index in (1, 2)] == [f"{paths[0]}:2", f"{paths[1]}:2"]


def test_a_folder_in_a_layout_of_the_hub(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    write(folder, "train.jsonl", ROWS)
    write(folder, "test.jsonl", ROWS[:1])
    assert rows_of(hub(folder, **TEMPLATES)) == list(expected())
    assert len(hub(folder, split="test", **TEMPLATES)) == 1
    assert len(hub(folder, split="train[1:]", **TEMPLATES)) == 2
    with pytest.raises(ConfigError, match=r"cannot be read: ValueError: Unknown split \"dev\""):
        hub(folder, split="dev", **TEMPLATES)


def test_a_name_that_the_hub_does_not_give_is_an_error(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="the data set nobody/nothing cannot be read"):
        hub("nobody/nothing", prompt="{question}")


def test_columns_that_need_no_template(tmp_path):
    chat = [{"role": "user", "content": "hello"}]
    path = write(tmp_path, "rows.jsonl", [{"prompt": chat, "completion": "hi"}])
    assert rows_of(lines([path])) == [{"prompt": chat, "completion": "hi"}]
    assert rows_of(lines([path], answer="{completion}!"))[0]["answer"] == "hi!"


def test_one_column_alone_keeps_its_type(tmp_path):
    path = write(tmp_path, "rows.jsonl", [{"messages": [{"role": "user", "content": "hello"}], "result": 4}])
    row = lines([path], prompt="{messages}", answer="{result}")[0]
    assert row["prompt"] == [{"role": "user", "content": "hello"}]
    assert row["answer"] == 4


def test_braces_of_a_text_are_written_twice(tmp_path):
    path = write(tmp_path, "rows.jsonl")
    assert lines([path], prompt="{{x}} {level}")[0]["prompt"] == "{x} 1"


@pytest.mark.parametrize("template", ["{", "{}", "{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "}"])
def test_a_template_that_is_none_is_refused(template):
    with pytest.raises(ValidationError):
        HubSettings(name="x", prompt=template)


def test_values_that_are_no_json_stay_behind(tmp_path):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "rows.parquet"
    frame = pandas.DataFrame(
        {"prompt": ["a"], "when": [pandas.Timestamp("2026-01-01")], "raw": [b"x"], "tags": [["t"]]}
    )
    frame.to_parquet(path)
    assert rows_of(files([path])) == [{"prompt": "a", "tags": ["t"]}]


def test_what_is_no_file_is_named(tmp_path):
    loop, pipe = tmp_path / "loop.jsonl", tmp_path / "pipe.jsonl"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"loop\.jsonl is a symbolic link that leads to no file"):
        lines([loop])
    with pytest.raises(ConfigError, match=r"pipe\.jsonl is a pipe or a device; write its rows to a file"):
        lines([pipe])


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n', encoding="utf-8-sig")
    assert rows_of(lines([path])) == [{"prompt": "a"}]


@pytest.mark.parametrize("read", [lines, files])
@pytest.mark.parametrize("key", ["messages", "chosen"])
def test_conversations_and_preferences_hold_their_prompts_themselves(key, read, tmp_path):
    row = {key: [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    assert rows_of(read([write(tmp_path, "rows.jsonl", [row])])) == [row]


@pytest.mark.parametrize("read", [lines, files])
def test_what_is_wrong_is_named(read, tmp_path):
    path = write(tmp_path, "rows.jsonl")
    with pytest.raises(ConfigError, match=r"missing\.jsonl does not exist(?s:.*)a path is relative to the config file"):
        read([tmp_path / "missing.jsonl"])
    with pytest.raises(ConfigError, match="is a folder; name the files in it"):
        read([tmp_path])
    with pytest.raises(ConfigError, match=r"has no column 'prompt'; it has question, solution, level: .*'{question}'"):
        read([path])
    with pytest.raises(ConfigError, match=r"answer: .*rows\.jsonl has no column 'result'; it has question"):
        read([path], prompt="{question}", answer="{result}")
    with pytest.raises(ConfigError, match=r"answer_after is given, and .* has no column 'answer'"):
        read([path], prompt="{question}", answer_after="####")
    with pytest.raises(IndexError, match="row 3 of 3"):
        read([path], prompt="{question}")[3]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    with pytest.raises(ConfigError, match=r"empty\.jsonl is empty; it must have at least one row"):
        read([empty])


def test_lines_that_are_no_json_are_told_by_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": \n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3 is no JSON: Expecting value"):
        lines([path])
    path.write_text('{"prompt": "a"}\n[1]\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 is a list, it must be an object"):
        lines([path])


def test_a_row_that_lacks_a_column_of_the_others_is_told_by_number(tmp_path):
    path = write(tmp_path, "rows.jsonl", [{"question": "a"}, {"other": "b"}])
    with pytest.raises(ValueError, match=r"prompt: row 1 of .* has no column 'question'"):
        lines([path], prompt="{question}")[1]


def test_files_that_cannot_be_read_and_formats_that_nobody_knows(tmp_path):
    broken = tmp_path / "rows.parquet"
    broken.write_text("no parquet")
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read: "):
        files([broken])
    with pytest.raises(ConfigError, match=r"end in \.csv and \.jsonl is unclear; set format"):
        files([write(tmp_path, "a.csv"), write(tmp_path, "b.jsonl")])
    odd = tmp_path / "rows.data"
    odd.write_text(json.dumps(ROWS[0]))
    with pytest.raises(ConfigError, match=r"end in \.data is unclear"):
        files([odd])
    assert len(files([odd], format="json", prompt="{question}")) == 1


def test_a_missing_library_names_its_extra(tmp_path, without):
    path = write(tmp_path, "rows.jsonl")
    without("datasets")
    for build in (lambda: FilesDataset(FilesSettings(paths=[path])), lambda: HubDataset(HubSettings(name="x"))):
        with pytest.raises(ConfigError, match=r"not installed: pip install './plugins/areal_rewards\[datasets\]'"):
            build()


def test_paths_of_a_model_made_by_hand_are_relative_to_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert JSONLinesSettings(paths=["rows.jsonl"]).paths == [Path.cwd() / "rows.jsonl"]


BROKEN = {
    "empty.jsonl": b"",
    "blank.jsonl": b"\n\n",
    "latin.jsonl": '{"prompt": "Grüße"}\n'.encode("latin-1"),
    "sixteen.jsonl": '{"prompt": "a"}\n'.encode("utf-16"),
    "binary.jsonl": bytes(range(256)),
    "cut.jsonl": b'{"prompt": "a"}\n{"prompt": "b',
    "list.jsonl": b'[{"prompt": "a"}]\n',
    "deep.jsonl": b"[" * 100_000 + b"]" * 100_000,
    "number.jsonl": b'{"prompt": "a", "answer": ' + b"9" * 5000 + b"}\n",
    "other.jsonl": b'{"question": "a"}\n',
    "cut.parquet": b"PAR1" + bytes(40),
    "ragged.csv": b"prompt,answer\na,b\nc,d,e,f\n",
    "zipped.csv": b"PK\x03\x04" + bytes(60),
    "deep.json": b"[" * 100_000,
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_by_name(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(BROKEN[name])
    # The library reads a list of rows, and takes a long number for a float.
    readers = [files] * (name not in {"list.jsonl", "number.jsonl"}) + [lines] * (path.suffix == ".jsonl")
    for read in readers:
        with pytest.raises((ConfigError, ValueError), match=re.escape(str(path))):
            rows_of(read([path]))
