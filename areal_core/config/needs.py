"""Collect what an algorithm's components need from models: roles, and forward passes before the advantages."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from areal_core.config.selection import Selection, selections
from areal_core.config.settings import Settings
from areal_core.errors import ConfigError
from areal_core.interfaces.algorithm import ForwardPass
from areal_core.interfaces.model import ACTOR, Role

if TYPE_CHECKING:
    from collections.abc import Iterator


def needs_of(part: object, updates: int) -> Iterator[Role | ForwardPass]:
    """Yield the roles and forward passes that an algorithm's settings and all selections in them need.

    Args:
        part: settings, or a selection. A component without a settings model declares its needs with an attribute
            `needs`: a function of the number of updates. For an example see `roles_of`.
        updates: optimizer updates per batch.

    Raises:
        ConfigError: `needs` of a component is not a function of the number of updates.
        NotReadError: unread settings are needed, within `leaving_unread`.
    """
    if isinstance(part, Settings):
        yield from part.needs(updates)
    for _, chosen in selections(part):
        try:
            yield from chosen.declared("needs", lambda _: ())(updates)
        except TypeError as error:
            words = "must be a function of the number of updates that gives roles and passes"
            raise ConfigError(f"'needs' of '{chosen.target}' {words}: {error}") from error


def roles_of(algorithm: Selection, updates: int) -> dict[str, Role]:
    """Return the roles of a run by name. The weights of the first role are synced to the servers and exported.

    An algorithm that declares no role has one, the actor.

    Args:
        algorithm: the selected algorithm.
        updates: optimizer updates per batch.

    Raises:
        ConfigError: two components define a role differently, the first role does not learn, or an EMA is not one of
            a role that learns with the same head.

    Example:
        >>> from areal_core.config import Selection, Settings, needs_of, roles_of
        >>> from areal_core.sdk import ACTOR, REFERENCE, ForwardPass
        >>> class MethodSettings(Settings):
        ...     def needs(self, updates):
        ...         return [ACTOR, ForwardPass(REFERENCE, "logprobs", column="reference_logprobs")]
        >>> list(roles_of(Selection("algorithms", "mine/method", MethodSettings()), updates=1))
        ['actor', 'reference']
        >>> [need.column for need in needs_of(MethodSettings(), updates=1) if isinstance(need, ForwardPass)]
        ['reference_logprobs']
    """
    roles: dict[str, Role] = {}
    for need in needs_of(algorithm, updates):
        role = need.role if isinstance(need, ForwardPass) else need
        if roles.setdefault(role.name, role) != role:
            one, other = asdict(roles[role.name]), asdict(role)
            message = ", ".join(f"{key} is {one[key]} and {other[key]}" for key in one if one[key] != other[key])
            raise ConfigError(f"two components mean different roles by '{role.name}': {message}")
    roles = roles or {ACTOR.name: ACTOR}
    for role in roles.values():
        _check_ema(role, roles)
    if not (first := next(iter(roles.values()))).trains:
        raise ConfigError(f"the first role that is needed, '{first.name}', does not learn: there is nothing to sync")
    return roles


def _check_ema(role: Role, roles: dict[str, Role]) -> None:
    """Raise `ConfigError` unless an EMA follows a role that learns and has the same head."""
    ema = role.ema
    if ema is None:
        return
    source = roles.get(ema.role)
    if role.trains or source is None or not source.trains or source.head != role.head:
        words = "which is not a role of the same head that learns"
        raise ConfigError(f"the role '{role.name}' is an EMA of '{ema.role}', {words}")
    if ema.every < 1 or not 0 <= ema.decay < 1:
        words = "every must be at least 1, decay from 0 to below 1"
        raise ConfigError(f"the role '{role.name}' has {ema}: {words}")
