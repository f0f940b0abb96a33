"""The command."""

import pytest
from areal_core.errors import UsageError

from areal_example.commands import count_steps


def test_count_steps(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("steps: 2\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert count_steps([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "2\n"


def test_another_folder_is_refused(tmp_path):
    with pytest.raises(UsageError):
        count_steps([str(tmp_path / "typo")])
