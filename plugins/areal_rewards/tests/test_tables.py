import gzip
import json
import os
import re
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from pydantic import ValidationError

from areal_core.errors import ConfigError
from areal_core.workflows.settings import SingleTurnSettings
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


def test_what_json_has_no_type_for_is_carried_as_text_or_bytes_or_its_column_is_reported(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "prompt": ["a"],
        "when": [datetime(2026, 1, 1, 12)],
        "in_zone": [datetime(2026, 1, 1, 12, tzinfo=UTC)],
        "day": [date(2026, 1, 2)],
        "hour": [time(1, 2, 3)],
        "price": [Decimal("1.50")],
        "whole": [Decimal(10**30)],
        "took": [timedelta(1)],
        "all_took": [[{"lap": timedelta(1)}]],
        "raw": [b"x"],
        "tags": [["t", None]],
        "days": [[date(2026, 1, 2)]],
    }
    rows = parquet(tmp_path, arrow.table(columns))
    assert rows_of(rows) == [
        {
            "prompt": "a", "when": "2026-01-01T12:00:00", "in_zone": "2026-01-01T12:00:00+00:00", "day": "2026-01-02",
            "hour": "01:02:03", "price": "1.50", "whole": "1" + "0" * 30, "raw": b"x", "tags": ["t", None],
            "days": ["2026-01-02"],
        }
    ]  # fmt: skip
    notes = "\n".join(rows.notes())
    assert "column 'took' holds durations, which no row can carry: it is left out; store it as a number" in notes
    assert "column 'all_took' holds durations, which no row can carry" in notes
    assert "column 'when' holds times, as ISO text" in notes
    assert "column 'day' holds dates, as ISO text" in notes
    assert "column 'hour' holds times of day, as ISO text" in notes
    assert "column 'price' holds decimals, as text" in notes
    for name in ("prompt", "raw", "tags"):
        assert f"'{name}'" not in notes


def test_a_column_that_is_left_out_is_reported_by_the_check_that_looks_for_it(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    arrow.parquet.write_table(arrow.table({"question": ["a"], "took": [timedelta(1)]}), path)
    with pytest.raises(ConfigError, match=r"answer: .* has no column 'took'(?s:.*)column 'took' holds durations"):
        files([path], prompt="{question}", answer="{took}")


def parquet(folder, table, **settings):
    parquet_module = pytest.importorskip("pyarrow.parquet")
    parquet_module.write_table(table, folder / "rows.parquet")
    return files([folder / "rows.parquet"], **settings)


def test_types_of_parquet_arrive_as_what_they_are(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    columns = {
        "prompt": arrow.array(["a", "b"], arrow.large_string()),
        "count": arrow.array([1, None]),
        "large": arrow.array([2**64 - 1, 0], arrow.uint64()),
        "flag": arrow.array([True, None]),
        "kind": arrow.array(["x", "y"]).dictionary_encode(),
        "view": arrow.array(["x", None], arrow.string_view()),
        "pair": arrow.array([[1, 2], [3, 4]], arrow.list_(arrow.int64(), 2)),
    }
    first, second = rows_of(parquet(tmp_path, arrow.table(columns)))
    assert first == {
        "prompt": "a", "count": 1, "large": 2**64 - 1, "flag": True, "kind": "x", "view": "x", "pair": [1, 2],
    }  # fmt: skip
    assert second == {
        "prompt": "b", "count": None, "large": 0, "flag": None, "kind": "y", "view": None, "pair": [3, 4],
    }  # fmt: skip
    assert [type(value) for value in first.values()] == [str, int, int, bool, str, str, list]


def test_a_type_that_the_library_cannot_read_is_an_error_with_a_remedy(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    column = arrow.array([[("k", 1)]], arrow.map_(arrow.string(), arrow.int64()))
    with pytest.raises(ConfigError, match=r"rows\.parquet cannot be read: .*map<(?s:.*)store that column as text"):
        parquet(tmp_path, arrow.table({"prompt": ["a"], "m": column}))


NESTED = [
    {"prompt": "a", "empty": None, "deep": {"x": {"y": 1}, "items": [{"p": 1}, None, {"q": {"r": "s"}}]}},
    {"prompt": "b", "empty": "e", "deep": {"x": {"z": [None, 2]}, "items": []}},
]


@pytest.mark.parametrize("read", ["parquet", "hub"])
def test_nulls_that_arrow_puts_into_structs_are_removed_at_any_depth_and_no_others(read, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    table = arrow.Table.from_pylist(NESTED)
    if read == "parquet":
        assert rows_of(parquet(tmp_path, table)) == NESTED
        return
    folder = tmp_path / "set"
    folder.mkdir()
    parquet(folder, table)
    assert rows_of(hub(folder)) == NESTED


def test_nulls_of_json_are_the_users_own(tmp_path):
    row = {"prompt": "a", "deep": {"x": None, "items": [{"default": None}]}}
    for path in (write(tmp_path, "rows.jsonl", [row]), write(tmp_path, "rows.json", [row])):
        assert rows_of(files([path])) == [row]
    assert rows_of(lines([tmp_path / "rows.jsonl"])) == [row]
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "deep": datasets.Json()})
    datasets.Dataset.from_list([row], features=features).to_parquet(tmp_path / "rows.parquet")
    assert rows_of(files([tmp_path / "rows.parquet"])) == [row]


EXACT = [
    {"prompt": "2024-01-01", "answer": "2024-01-01T00:00:00", "n": 1, "x": 1, "big": 10**30, "mixed": [1, "a", None]},
    {"prompt": "2024-01-02", "answer": "2024-01-02 10:00:00", "n": None, "x": 1.5, "big": 2**63, "s": {"a": 1}},
    {"prompt": "b", "x": True, "big": 1, "s": {"b": {"c": "7"}}, "m": [{"content": "t"}, {"content": [{"x": 1}]}]},
]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_json_is_read_exactly(name, tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    path = write(folder, name, EXACT)
    for rows in (rows_of(files([path])), rows_of(hub(folder))):
        assert rows == EXACT
        assert [[type(value) for value in row.values()] for row in rows] == [
            [type(value) for value in row.values()] for row in EXACT
        ]


def test_forms_of_json_files(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"prompt": "a", "answer": [1]}, indent=2))
    assert rows_of(files([path])) == [{"prompt": "a", "answer": [1]}]
    path.write_text('{"prompt": "a", "prompt": "b"}')
    with pytest.raises(ConfigError, match=r"rows\.json:1 is not valid JSON: an object has several values for 'prompt'"):
        files([path])
    path.write_text('[{"prompt": "a"}, 7]')
    with pytest.raises(ConfigError, match=r"rows\.json, element 1 \(counted from 0\) is a int"):
        files([path])
    packed = tmp_path / "rows.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"prompt": "a"}\n'))
    assert rows_of(files([packed], format="json")) == [{"prompt": "a"}]
    packed.write_bytes(b"PK\x03\x04")
    with pytest.raises(ConfigError, match="is a zip archive: unpack it"):
        files([packed], format="json")


CELLS = {
    "leading zeros": (["007", "8"], ["007", "8"]),
    "an exponent": (["1e5", "2"], ["1e5", "2"]),
    "missing values by other names": (["NA", "null", "None", "nan", ""], ["NA", "null", "None", "nan", ""]),
    "not a number": (["nan", "1.5"], ["nan", "1.5"]),
    "infinite": (["inf", "1.5"], ["inf", "1.5"]),
    "true and false": (["True", "false"], ["True", "false"]),
    "integers": (["1", "-2"], [1, -2]),
    "integers with a gap": (["1", ""], [1, None]),
    "both kinds": (["1", "0.5"], [1, 0.5]),
    "trailing zeros": (["1", "2.50"], ["1", "2.50"]),
    "a plus sign": (["+1"], ["+1"]),
    "spaces": ([" 7"], [" 7"]),
    "thousands": (["1_000"], ["1_000"]),
    "other digits": (["\u0663"], ["\u0663"]),
    "more than 64 bits": (["123456789012345678901234567890"], ["123456789012345678901234567890"]),
    "a fraction": (["1/2"], ["1/2"]),
    "a date": (["2024-01-01"], ["2024-01-01"]),
    "nothing": (["", ""], ["", ""]),
    "a line break": (['"a\r\nb"'], ["a\r\nb"]),
    "a quote": (['"a ""b"""'], ['a "b"']),
}


@pytest.mark.parametrize("kind", CELLS)
@pytest.mark.parametrize("read", ["files", "hub"])
def test_cells_of_csv_are_numbers_only_in_their_plain_spelling(kind, read, tmp_path):
    written, wanted = CELLS[kind]
    folder = tmp_path / "set"
    folder.mkdir()
    path = folder / "rows.csv"
    path.write_text("prompt,answer\n" + "".join(f"p,{cell}\n" for cell in written), newline="")
    answers = [row["answer"] for row in rows_of(files([path]) if read == "files" else hub(folder))]
    assert answers == wanted
    assert [type(answer) for answer in answers] == [type(answer) for answer in wanted]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prompt;answer\na;1,5\n", r"has a single column, 'prompt;answer': set delimiter: ';'"),
        ("prompt\tanswer\na\t1\n", r"set delimiter: '\\t'"),
        ("prompt,answer\na\n", r":2 has 1 cells, but the first line has 2"),
        ("prompt,answer\na,b,c\nd,e,f\n", r":2 has 3 cells, but the first line has 2"),
        ("prompt,prompt\na,b\n", r"has several columns 'prompt'"),
        ('prompt,answer\n"a,1\nb,2\n', r"is not valid CSV: unexpected end of data"),
        ("prompt,answer\n", "is empty"),
    ],
)
def test_csv_that_would_be_read_as_nonsense_is_an_error(text, words, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        files([path])


def test_csv_with_another_delimiter_a_byte_order_mark_and_long_cells(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"prompt;answer\n{'a' * 200_000};1,5\n\nb;2\n", encoding="utf-8-sig")
    rows = files([path], delimiter=";")
    assert rows_of(rows) == [{"prompt": "a" * 200_000, "answer": "1,5"}, {"prompt": "b", "answer": "2"}]
    assert rows.describe_row(1) == f"{path}:4"
    other = tmp_path / "other.csv"
    other.write_text("answer,prompt\n7,c\n")
    path.write_text("prompt,answer\na,8\n")
    assert rows_of(files([path, other])) == [{"prompt": "a", "answer": 8}, {"prompt": "c", "answer": 7}]
    other.write_text("prompt,result\nc,7\n")
    with pytest.raises(ConfigError, match=r"other\.csv has the columns prompt, result, but .* has prompt, answer"):
        files([path, other])


def test_options_of_a_data_sets_card_are_honored_or_noted(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "rows.csv").write_text("prompt;answer\na;007\n")
    card = "---\nconfigs:\n- config_name: default\n  {}\n  data_files: rows.csv\n---\n"
    (folder / "README.md").write_text(card.format("sep: ';'"))
    read = hub(folder)
    assert (rows_of(read), read.notes()) == ([{"prompt": "a", "answer": "007"}], [])
    (folder / "README.md").write_text(card.format("sep: ';'\n  skiprows: 0"))
    (note,) = hub(folder).notes()
    assert "its card sets skiprows for csv files, so the library `datasets` reads them" in note


def test_metadata_beside_images_is_noted(tmp_path):
    images = pytest.importorskip("PIL.Image")
    folder = tmp_path / "set"
    folder.mkdir()
    images.new("RGB", (2, 2)).save(folder / "a.png")
    (folder / "metadata.csv").write_text("file_name,prompt,code\na.png,hi,007\n")
    (note,) = hub(folder).notes()
    assert "it has metadata.csv in addition to its files, so the library `datasets` reads them" in note


def test_a_table_with_no_column_that_a_row_can_carry_names_them(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(ConfigError, match=r"is empty(?s:.*)column 'took' holds durations"):
        parquet(tmp_path, arrow.table({"took": [timedelta(1)]}))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_template_never_writes_null(name, tmp_path):
    path = write(tmp_path, name, [{"question": "a", "context": "c"}, {"question": "b", "context": None}])
    with pytest.raises(ConfigError, match=r"prompt: column 'context' is null in row 1 .*a template cannot write null"):
        files([path], prompt="{context} {question}")
    assert files([path], prompt="{context} {question}", limit=1)[0]["prompt"] == "c a"
    assert files([path], prompt="{question}", answer="{context}")[1]["answer"] is None


@pytest.mark.parametrize("read", ["files", "hub"])
def test_images_travel_as_they_are_stored(read, tmp_path):
    datasets, images = pytest.importorskip("datasets"), pytest.importorskip("PIL.Image")
    made = images.new("RGB", (4, 4), "red")
    table = datasets.Dataset.from_dict({"prompt": ["?"], "image": [made], "images": [[made, made]]})
    table = table.cast_column("image", datasets.Image())
    folder = tmp_path / "set"
    folder.mkdir()
    table.to_parquet(folder / "rows.parquet")
    row = (files([folder / "rows.parquet"]) if read == "files" else hub(folder))[0]
    assert row["image"]["bytes"].startswith(b"\x89PNG")
    assert [part["bytes"][:4] for part in row["images"]] == [b"\x89PNG"] * 2
    problem = SingleTurnSettings().check_row({"prompt": "?", "picture": row["image"]})
    assert problem.startswith("has an image ('picture')")


def test_what_is_no_file_is_named(tmp_path):
    loop, pipe = tmp_path / "loop.jsonl", tmp_path / "pipe.jsonl"
    loop.symlink_to(loop)
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"loop\.jsonl is a symbolic link to a file that does not exist"):
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
    with pytest.raises(ConfigError, match=r"answer_after is set, but .* has no column 'answer'"):
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
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3 is not valid JSON: Expecting value"):
        lines([path])
    path.write_text('{"prompt": "a"}\n[1]\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:2 is a list; it must be an object"):
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
    path = write(tmp_path, "rows.parquet")
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
    # `files` reads an array of rows too.
    readers = [files] * (name != "list.jsonl") + [lines] * (path.suffix == ".jsonl")
    for read in readers:
        with pytest.raises((ConfigError, ValueError), match=re.escape(str(path))):
            rows_of(read([path]))
