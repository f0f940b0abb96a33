"""Whatever stands in a config, `areal` says what is wrong with it, and soon: no traceback, no hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = Path(__file__).with_name("fuzz.py")


def survived(kit, count: int, seed: int) -> tuple[list[object], int]:
    """What `fuzz.py` reports of so many mutants: the cases that were not survived, and how many were tried."""
    done = kit.python(f"import runpy, sys; sys.argv = ['', '{count}', '{seed}']\n"
                      f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')")  # fmt: skip
    assert not done.err, done.err
    *faults, last = [json.loads(line) for line in done.out.splitlines()]
    return faults, last["tried"]


def test_mutated_configs_and_overrides(kit):
    faults, tried = survived(kit, 150, 1)
    assert faults == []
    assert tried > 300


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_many_mutated_configs_and_overrides(kit, seed):
    assert survived(kit, 800, seed)[0] == []


@pytest.mark.parametrize("key", ["base_dir", "model.path"])
def test_a_name_that_is_too_long_for_a_file(kit, key):
    done = kit.areal("config", "check", "run.yaml", f"{key}={'x' * 5000}")
    assert done.code in (0, 1, 2), "whatever is said of it is said without a traceback"
    assert "Traceback" not in done.err
