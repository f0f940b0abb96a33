"""Conformance suite of example tokenizers: from a row of a data set to token sequences and loss masks."""

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
    """Tests of an example tokenizer. Set `component` (and `settings`) and `rows`, or override `make`.

    Attributes:
        rows: examples of every form that the example tokenizer accepts.
        sequences: number of sequences of a row. They form one sequence group.
    """

    kind: ClassVar[str] = "example_tokenizers"
    rows: ClassVar[Sequence[Mapping[str, Any]]] = ()
    sequences: ClassVar[int] = 1

    def make_tokenizer(self) -> Any:
        """Return the tokenizer that is passed to the component. Override this if rows need a chat template."""
        return FakeTokenizer()

    def encoded(self, row: Mapping[str, Any]) -> Sequence[Trajectory]:
        """Return the sequences of a row."""
        sequences: Sequence[Trajectory] = self.make()(row, tokenizer=self.make_tokenizer())
        return sequences

    def test_rows_become_sequence_groups(self) -> None:
        """A row becomes `sequences` sequences. Each has a token in the loss, and the first token is not in it."""
        assert self.rows, "the suite has no rows: set `rows`"
        for row in self.rows:
            sequences = self.encoded(row)
            assert len(sequences) == self.sequences, f"{row} became {len(sequences)} sequences, not {self.sequences}"
            for sequence in sequences:
                assert isinstance(sequence, Trajectory), f"{row} became a {type(sequence).__name__}"
                mask = sequence.tokens["loss_mask"]
                assert bool(mask.any()), f"no token of {row} is in the loss"
                assert not bool(mask[0]), "the first token is in the loss, and but no token before it can predict it"

    def test_rows_of_every_form_fit_into_one_batch(self) -> None:
        """Sequences of all rows have the same fields, so that a batch may contain all of them."""
        PackedBatch.from_trajectories([sequence for row in self.rows for sequence in self.encoded(row)])

    def test_the_result_depends_only_on_the_row(self) -> None:
        """A row gives the same sequences again, and is not changed."""
        for row in self.rows:
            row_before = copy.deepcopy(dict(row))
            first, second = self.encoded(row), self.encoded(row)
            assert dict(row) == row_before, "the example tokenizer changed the row in place"
            for sequence, repeated in zip(first, second, strict=True):
                for key in ("input_ids", "loss_mask"):
                    assert np.array_equal(sequence.tokens[key], repeated.tokens[key]), f"{row} was encoded differently"

    def test_an_invalid_row_is_refused(self) -> None:
        """A row without the needed keys raises an error that names them."""
        for row in ({}, {"no_such_key": 1}, {"prompt": None}):
            with pytest.raises((KeyError, ValueError, TypeError)) as caught:
                self.encoded(row)
            assert len(str(caught.value)) > 20, f"the error of {row} does not name what is needed: {caught.value!r}"
