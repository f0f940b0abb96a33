"""What the components of an algorithm need of models: the roles of a run, and the passes before its advantages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from areal_core.config.selection import Selection, selections
from areal_core.config.settings import Settings
from areal_core.errors import ConfigError
from areal_core.interfaces.algorithm import Pass

if TYPE_CHECKING:
    from collections.abc import Iterator

    from areal_core.interfaces.training import Role


def needs_of(part: object, updates: int) -> Iterator[Role | Pass]:
    """What an algorithm's settings, or a choice in them, and everything chosen below it need.

    Args:
        part: settings, or a selection. What is chosen by import says it by a function `needs` of its own.
        updates: optimizer updates on a batch.
    """
    if isinstance(part, Settings):
        yield from part.needs(updates)
    for _, chosen in selections(part):
        owner: Any = chosen.settings if isinstance(chosen.settings, Settings) else None
        if owner is None and chosen.record is None:
            owner = chosen.load()
        yield from getattr(owner, "needs", _nothing)(updates)


def roles_of(algorithm: Selection, updates: int) -> dict[str, Role]:
    """The roles of a run, by name; the first is the one whose weights are published and exported.

    Raises:
        ConfigError: two components mean different things by one name, or nobody needs any.
    """
    roles: dict[str, Role] = {}
    for need in needs_of(algorithm, updates):
        role = need.role if isinstance(need, Pass) else need
        if roles.setdefault(role.name, role) != role:
            raise ConfigError(f"two components mean different roles by '{role.name}': {roles[role.name]} and {role}")
    if not roles:
        raise ConfigError(
            f"'{algorithm.target}' says of no model that it needs it",
            hints=["give its settings a function needs(updates) that names its roles, ACTOR first"],
        )
    return roles


def _nothing(updates: int) -> tuple[()]:
    return ()
