"""A training engine, as far as weight syncs know it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch


def engine_that_gathers(gather: Callable[[], Iterator[tuple[str, torch.Tensor]]]) -> Any:
    """Return an engine whose parameters `gather` yields, each valid until the next."""

    def describe() -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, value.to("meta")) for name, value in gather())

    return SimpleNamespace(named_full_parameters=gather, named_meta_parameters=describe)
