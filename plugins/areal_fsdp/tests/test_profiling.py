"""Traces of chosen updates."""

import gzip
import json
import os
from types import SimpleNamespace

from areal_fsdp.config import FSDPConfig


def test_only_the_named_updates_are_traced(make_engine, program, batch, tmp_path, capsys):
    folder = tmp_path / "a folder"
    engine = make_engine(profile={"updates": [2], "folder": str(folder)})
    for _ in range(3):
        program.train(engine, batch)
    (trace,) = folder.iterdir()
    assert trace.name == f"actor-rank0-update2-{os.getpid()}.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert {"aten::mm", "Optimizer.step#AdamW.step"} <= {event.get("name") for event in events}
    assert f"the trace of update 2 is in {trace}" in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_does_not_fail_the_update(make_engine, program, batch, tmp_path, capsys):
    taken = tmp_path / "file"
    taken.write_text("")
    engine = make_engine(profile={"updates": [1], "folder": str(taken)})
    assert program.train(engine, batch)["gradient_norm"] > 0
    assert f"the trace of update 1 cannot be written to {taken}/" in capsys.readouterr().err


def test_a_folder_that_is_a_file_is_refused_before_the_run(tmp_path):
    (tmp_path / "file").write_text("")
    for name, count in (("file", 1), ("file/below", 1), ("new/below", 0)):
        settings = FSDPConfig(profile={"updates": [1], "folder": str(tmp_path / name)})
        problems = list(settings.check(SimpleNamespace(longest_sequence=1, trainer_processes=1)))
        assert len(problems) == count
        assert not count or f"profile.folder: {tmp_path / 'file'} is a file" in problems[0]
