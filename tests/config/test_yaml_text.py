"""YAML 1.2 in and out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_core.config.yaml_text import dump, parse_value, parse_yaml

TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=8)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1.", 1.0),
        (".5", 0.5),
        ("off", "off"),
        ("yes", "yes"),
        ("NO", "NO"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("0o17", 15),
        ("0x1F", 31),
        ("017", 17),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2026-01-01", "2026-01-01"),
        ("-.inf", -math.inf),
        ("'3'", "3"),
        ('"on"', "on"),
        ("[1, 2.0, x]", [1, 2.0, "x"]),
        ("{type: a/b, n: 1}", {"type": "a/b", "n": 1}),
        ("=", "="),
    ],
)
def test_words_mean_what_version_1_2_says(text, value):
    found = parse_value(text)
    assert found == value
    assert type(found) is type(value)


def test_not_a_number():
    assert math.isnan(parse_value(".nan"))


@pytest.mark.slow
@settings(max_examples=300)
@given(st.dictionaries(TEXTS, VALUES))
def test_what_is_written_is_read_back(values):
    assert parse_yaml(dump(values), "test").values == values


def test_every_key_knows_its_line():
    document = parse_yaml("a: 1\nb:\n  c: x\n  d:\n    - 1\n    - {e: 2}\n", "test")
    assert document.lines["a",] == 1
    assert document.lines["b", "c"] == 3
    assert document.lines["b", "d", 1, "e"] == 6
