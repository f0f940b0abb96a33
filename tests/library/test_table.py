"""The table of metrics and samples."""

from __future__ import annotations

import pytest

from areal_core import Table

ROWS = [{"step": 1, "reward": 0.25}, {"step": 2, "loss": 1e-7, "text": "a\nlong text " + "x" * 60}]


def test_rows_columns_and_parts() -> None:
    table = Table(ROWS)
    assert (len(table), table.columns) == (2, ["step", "reward", "loss", "text"])
    assert table["reward"] == [0.25, None]
    assert list(table) == ROWS
    assert list(table[1:]) == ROWS[1:]
    table[0]["step"] = 9
    assert table[0]["step"] == 1, "a row is a copy"
    with pytest.raises(KeyError, match="there is no column 'los'; columns: step, reward, loss, text"):
        table["los"]
    with pytest.raises(IndexError):
        table[2]


def test_it_prints_the_last_rows_of_some_columns() -> None:
    assert (
        repr(Table(ROWS, printed=("step", "reward", "absent"))) == "2 rows, 4 columns\nstep  reward\n   1    0.25\n   2"
    )
    many = repr(Table([{"step": number} for number in range(30)])).splitlines()
    assert many[0] == "30 rows, 1 columns; the last 10:"
    assert [line.strip() for line in many[2:]] == [str(number) for number in range(20, 30)]
    assert repr(Table([])) == "0 rows, 0 columns"
    assert "a long text xxx" in repr(Table(ROWS))
    assert max(map(len, repr(Table(ROWS)).splitlines())) < 90


def test_pandas() -> None:
    pytest.importorskip("pandas")
    frame = Table(ROWS).to_pandas()
    assert list(frame.columns) == ["step", "reward", "loss", "text"]
    assert frame["step"].tolist() == [1, 2]
