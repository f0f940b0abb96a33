"""Data set and algorithm of a server's config: placeholders, because clients bring data and losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from areal_core.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Sequence


class ClientData:
    """A data set without rows."""

    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        raise IndexError(index)


class ClientLosses:
    """An algorithm whose losses come from clients: it plans memory for one model that learns."""

    encode = None
    group_filters: Sequence[Any] = ()

    def prepare(self, *_: Any) -> NoReturn:
        """Refuse to train.

        Raises:
            RunError: always.
        """
        raise RunError(
            "a config for Tinker clients cannot be run without clients", hints=["start it with: areal tinker serve"]
        )

    updates = prepare
