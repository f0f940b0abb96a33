"""Values of Arrow tables as rows hold them."""

from __future__ import annotations

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest

from areal_core.data.tables import plain_value


class Leaf:
    """A feature of which nothing is known, such as decoded JSON."""


class ListOf:
    """A feature of lists."""

    def __init__(self, feature: Any) -> None:
        self.feature = feature


@pytest.mark.parametrize(
    ("value", "feature", "wanted"),
    [
        ({"a": None, "b": {"c": None}}, {"a": Leaf(), "b": {"c": Leaf()}}, {"b": {}}),
        ([{"a": None, "b": 1}, None], ListOf({"a": Leaf(), "b": Leaf()}), [{"b": 1}, None]),
        ([{"a": None, "b": 1}], [{"a": Leaf(), "b": Leaf()}], [{"b": 1}]),
        ({"a": {"b": None}}, {"a": Leaf()}, {"a": {"b": None}}),
        ([{"b": None}], ListOf(Leaf()), [{"b": None}]),
        (None, {"a": Leaf()}, None),
        ({"day": date(2026, 1, 2)}, {"day": Leaf()}, {"day": "2026-01-02"}),
        (datetime(2026, 1, 2, 3, tzinfo=UTC), Leaf(), "2026-01-02T03:00:00+00:00"),
        (Decimal("1.50"), Leaf(), "1.50"),
        (Decimal("1E+3"), Leaf(), "1000"),
        (b"raw", Leaf(), b"raw"),
    ],
)
def test_nulls_of_structs_are_removed_and_those_of_json_and_lists_stay(value: Any, feature: Any, wanted: Any) -> None:
    assert plain_value(value, feature) == wanted


def test_without_features_every_mapping_is_a_struct() -> None:
    assert plain_value([{"a": None, "b": [{"c": None}]}]) == [{"b": [{}]}]
