"""The command."""

from areal_example.commands import count_steps


def test_count_steps(tmp_path, capsys):
    assert count_steps([str(tmp_path)]) == 0
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    assert count_steps([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "0\n2\n"
