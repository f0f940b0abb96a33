"""What a data set must do: the same rows by the same numbers, in every process that opens it."""

from __future__ import annotations

import copy
import json
from typing import Any, ClassVar

import pytest

from areal_testing.conformance.components import ComponentSuite


class DatasetSuite(ComponentSuite):
    """Set `component` (and `settings`), or override `make`.

    Attributes:
        keys: that every row has; `prompt` where a workflow of the core plays it.
        most: rows that are looked at.
    """

    kind: ClassVar[str] = "datasets"
    keys: ClassVar[tuple[str, ...]] = ("prompt",)
    most = 50

    def _numbers(self, dataset: Any) -> range:
        return range(min(len(dataset), self.most))

    def test_rows_are_mappings_with_the_keys(self) -> None:
        """And there is at least one."""
        dataset = self.make()
        assert len(dataset) > 0, "the data set is empty"
        for number in self._numbers(dataset):
            row = dict(dataset[number])
            missing = [key for key in self.keys if key not in row]
            assert not missing, f"row {number} has no {', '.join(missing)}; it has {', '.join(row)}"

    def test_a_number_always_means_the_same_row(self) -> None:
        """In whatever order they are asked for, and in another process: a resumed run asks again."""
        first, second = self.make(), self.make()
        assert len(first) == len(second)
        rows = [copy.deepcopy(dict(first[number])) for number in self._numbers(first)]
        again = [dict(second[number]) for number in reversed(self._numbers(second))]
        assert again[::-1] == rows, "a second object, or another order, gives other rows"

    def test_what_a_workflow_does_to_a_row_is_its_own_affair(self) -> None:
        """A row that somebody has changed is not changed for the next one who asks."""
        dataset = self.make()
        row = dataset[0]
        before = copy.deepcopy(dict(row))
        if isinstance(row, dict):
            row.clear()
        assert dict(dataset[0]) == before, "the data set hands out the row itself: give a copy of it"

    def test_rows_travel_between_processes(self) -> None:
        """Rewards are computed in processes of their own."""
        dataset = self.make()
        for number in self._numbers(dataset):
            try:
                json.dumps(dict(dataset[number]), allow_nan=False)
            except (TypeError, ValueError) as error:
                pytest.fail(f"row {number} is no JSON: {error}")

    def test_there_is_no_row_behind_the_last(self) -> None:
        """An IndexError says so."""
        dataset = self.make()
        with pytest.raises(IndexError):
            dataset[len(dataset)]
