"""Property: a resolved config, written out and read back, is the same config."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.config import load_run, resolve

pytestmark = pytest.mark.slow

PARTS = """
from areal_core.config import Settings, Selection, component, Secret
from areal_core.interfaces import ACTOR, REFERENCE

class Part:
    class Config(Settings):
        text: str = "off"
        number: float = 1.0
        numbers: list[int] = []
        secret: Secret | None = None
        inner: Selection | None = component("group_filters")
        many: list[Selection] = component("group_filters", default=[])

        def needs(self, updates):
            return [ACTOR, REFERENCE]

def plain(rewards, *, low: float = 0.0, name: str | None = None): ...
"""

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=12)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)


def section(**fields):
    return st.fixed_dictionaries({}, optional=fields)


PLAIN = section(low=NUMBER, name=st.none() | TEXT).map(lambda made: {"type": "parts.py:plain", **made})
PART = section(
    text=TEXT,
    number=NUMBER,
    numbers=st.lists(st.integers(), max_size=3),
    secret=st.just("env:NAME"),
    inner=PLAIN,
    many=st.lists(PLAIN, max_size=2),
).map(lambda made: {"type": "parts.py:Part", **made})

CONFIGS = st.fixed_dictionaries(
    {
        "steps": st.integers(1, 10**9),
        "model": st.fixed_dictionaries({"path": TEXT}),
        "dataset": PART,
        "train_engine": PART,
        "algorithm": PART,
        "launcher": st.just("parts.py:plain"),
    },
    optional={
        "seed": st.integers(0, 2**40),
        "sampling": section(temperature=st.floats(0.01, 1e9), stop=st.lists(TEXT.filter(bool), max_size=3)),
        "trackers": st.lists(PART, max_size=2),
        "evaluation": st.fixed_dictionaries({"dataset": PART}, optional={"limit": st.none() | st.integers(1, 99)}),
        "roles": st.dictionaries(st.sampled_from(["actor", "reference"]), PART, max_size=2),
    },
)


@settings(max_examples=25)
@given(CONFIGS)
def test_a_run_folder_gives_back_an_equal_config(written):
    from areal_core.config.yaml_text import dump

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "parts.py").write_text(PARTS)
        (folder / "run.yaml").write_text(dump(written))
        resolved = resolve(folder / "run.yaml", environment={})
        run_dir = folder / "run"
        run_dir.mkdir()
        (run_dir / "config.yaml").write_text(resolved.to_yaml())
        again = load_run(run_dir)
        assert again.config == resolved.config
        assert again.to_yaml() == resolved.to_yaml()
        assert again.files == resolved.files
