"""The ranks by which `areal doctor MODEL` tries layouts."""

import sys

from areal_fsdp.model_checks import _ranks

RANK = """#!/bin/sh
if [ "$5" = 1 ]; then
    head -c 200000 /dev/zero | tr '\\0' x >&2
    touch "$4"
else
    while [ ! -e "$4" ]; do sleep 0.05; done
    echo '{"tensor": "yes"}'
fi
"""


def make_ranks(folder, script, monkeypatch):
    program = folder / "rank"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


def test_a_rank_that_writes_much_keeps_no_other_one_waiting(tmp_path, monkeypatch):
    make_ranks(tmp_path, RANK, monkeypatch)
    assert _ranks(tmp_path, tmp_path) == (True, '{"tensor": "yes"}\n')


def test_a_rank_that_fails_ends_the_others(tmp_path, monkeypatch):
    make_ranks(tmp_path, '#!/bin/sh\n[ "$5" = 1 ] && echo broken >&2 && exit 1\nexec sleep 600\n', monkeypatch)
    assert _ranks(tmp_path, tmp_path) == (False, "broken\n")
