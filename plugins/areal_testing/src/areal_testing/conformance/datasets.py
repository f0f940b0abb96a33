"""Conformance suite of data sets: an index gives the same row in every process that opens the data set."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

import pytest

from areal_testing.conformance.components import ComponentSuite


class DatasetSuite(ComponentSuite):
    """Tests of a data set. Set `component` (and `settings`), or override `make`.

    Attributes:
        keys: keys that each row must have. The workflows of the core read `prompt`.
        most: number of rows that are checked, from the first on.
    """

    kind: ClassVar[str] = "datasets"
    keys: ClassVar[tuple[str, ...]] = ("prompt",)
    most = 50

    def _indices(self, dataset: Any) -> range:
        return range(min(len(dataset), self.most))

    def test_rows_are_mappings_with_the_keys(self) -> None:
        """The data set has at least one row, and each row has the keys."""
        dataset = self.make()
        assert len(dataset) > 0, "the data set is empty"
        for index in self._indices(dataset):
            row = dict(dataset[index])
            missing = [key for key in self.keys if key not in row]
            assert not missing, f"row {index} has no {', '.join(missing)}; it has {', '.join(row)}"

    def test_an_index_always_means_the_same_row(self) -> None:
        """An index gives the same row in any order of access and in another object: a resumed run reads it again."""
        first, second = self.make(), self.make()
        assert len(first) == len(second)
        rows = [copy.deepcopy(dict(first[index])) for index in self._indices(first)]
        again = [dict(second[index]) for index in reversed(self._indices(second))]
        assert again[::-1] == rows, "a second object, or another order of access, gives other rows"

    def test_a_changed_row_does_not_change_the_dataset(self) -> None:
        """A caller that changes a row does not change it for the next caller."""
        dataset = self.make()
        row = dataset[0]
        before = copy.deepcopy(dict(row))
        if isinstance(row, dict):
            row.clear()
        assert dict(dataset[0]) == before, "the data set hands out the row itself: give a copy of it"

    def test_rows_are_json(self) -> None:
        """Rows can be sent as JSON to the processes that compute rewards."""
        dataset = self.make()
        for index in self._indices(dataset):
            try:
                json.dumps(dict(dataset[index]), allow_nan=False)
            except (TypeError, ValueError) as error:
                pytest.fail(f"row {index} is not JSON: {error}")

    def test_an_index_beyond_the_last_row_raises_index_error(self) -> None:
        """The data set raises IndexError for its length: iteration relies on it."""
        dataset = self.make()
        with pytest.raises(IndexError):
            dataset[len(dataset)]
