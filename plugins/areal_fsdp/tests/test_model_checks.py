"""The ranks with which `areal doctor MODEL` tests parallelism."""

import sys

from areal_fsdp.model_checks import _run_ranks

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


def test_a_rank_with_much_output_does_not_block_the_others(tmp_path, monkeypatch):
    make_ranks(tmp_path, RANK, monkeypatch)
    assert _run_ranks(tmp_path, tmp_path) == (True, '{"tensor": "yes"}\n')


def test_a_failed_rank_ends_the_others(tmp_path, monkeypatch):
    make_ranks(tmp_path, '#!/bin/sh\n[ "$5" = 1 ] && echo broken >&2 && exit 1\nexec sleep 600\n', monkeypatch)
    assert _run_ranks(tmp_path, tmp_path) == (False, "broken\n")
