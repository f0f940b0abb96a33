"""What example tokenizers must do: from a row of a data set to the sequences that are learned from."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest

from areal_core.data import PackedBatch, Trajectory
from areal_testing.conformance.components import ComponentSuite
from areal_testing.fakes import FakeTokenizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class ExampleTokenizerSuite(ComponentSuite):
    """Set `component` (and `settings`) and `rows`, or override `make`.

    Attributes:
        rows: examples of every form that the example tokenizer reads.
        sequences: how many a row becomes, which form one unit.
    """

    kind: ClassVar[str] = "example_tokenizers"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    sequences: ClassVar[int] = 1

    def make_tokenizer(self) -> Any:
        """What the example tokenizer is given; override this where rows need a chat template."""
        return FakeTokenizer()

    def encoded(self, row: Mapping[str, Any]) -> Sequence[Trajectory]:
        """The sequences of a row."""
        found: Sequence[Trajectory] = self.make()(row, tokenizer=self.make_tokenizer())
        return found

    def test_rows_become_units(self) -> None:
        """Of as many sequences as the author says, each with something to learn, and not from its first token on."""
        assert self.rows, "the suite has no rows: set `rows`"
        for row in self.rows:
            found = self.encoded(row)
            assert len(found) == self.sequences, f"{row} became {len(found)} sequences, not {self.sequences}"
            for each in found:
                assert isinstance(each, Trajectory), f"{row} became a {type(each).__name__}"
                mask = each.tokens["loss_mask"]
                assert bool(mask.any()), f"nothing is learned from {row}"
                assert not bool(mask[0]), "the first token is in the loss, and nothing stands before it to predict it"

    def test_rows_of_every_form_fit_into_one_batch(self) -> None:
        """They have the same keys."""
        PackedBatch.from_trajectories([each for row in self.rows for each in self.encoded(row)])

    def test_a_row_is_read_and_nothing_more(self) -> None:
        """The same row gives the same sequences again, and is not changed."""
        for row in self.rows:
            before = copy.deepcopy(dict(row))
            first, second = self.encoded(row), self.encoded(row)
            assert dict(row) == before, "the example tokenizer changed the row that it was given"
            for one, other in zip(first, second, strict=True):
                for key in ("input_ids", "loss_mask"):
                    assert np.array_equal(one.tokens[key], other.tokens[key]), f"{row} was encoded differently"

    def test_a_row_of_another_form_is_refused(self) -> None:
        """By an error that names what is needed, and not by a sequence of nothing."""
        for row in ({}, {"no_such_key": 1}, {"prompt": None}):
            with pytest.raises((KeyError, ValueError, TypeError)) as caught:
                self.encoded(row)
            assert len(str(caught.value)) > 20, f"the error of {row} says too little: {caught.value!r}"
