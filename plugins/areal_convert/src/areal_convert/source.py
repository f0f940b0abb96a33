"""A config of AReaL's: read, its interpolations resolved, and flat, so that every key is accounted for."""

from __future__ import annotations

import math
import re
from fnmatch import fnmatchcase
from functools import reduce
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import yaml

from areal_core.config import parse_yaml
from areal_core.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

TABLE: Final[dict[str, Any]] = yaml.safe_load((files("areal_convert") / "keys.yaml").read_text(encoding="utf-8"))
_REFERENCE: Final = re.compile(r"\$\{([\w.]+)\}")
SECTIONS: Final = ("actor", "rollout", "gconfig", "train_dataset")


class Source:
    """What an AReaL config says, by dotted key (a list is one value), and what has become of it.

    Attributes:
        carried: areal's key by AReaL's.
        lost: why a key was not carried.
        unused: why a key says nothing.
        defaults: the keys that the file leaves to AReaL's defaults.
        rows: of the training data; None where that is not known.
    """

    def __init__(self, tree: dict[str, Any], rows: int | None = None) -> None:
        whole = _laid(tree, TABLE["defaults"])
        self.flat = _flatten(_resolved(whole, whole, ()), "")
        given = _flatten(_resolved(tree, whole, ()), "")
        self.defaults = {key for key, value in self.flat.items() if value is not None and given.get(key) is None}
        self.carried: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        alike = _resolved(TABLE["alike"], whole, ())
        same = {key: "areal does so" for key, value in self.flat.items() if value in matching(alike, key)}
        self.unused = same | {key: "nothing is set" for key, value in self.flat.items() if value is None}
        self.rows: int | None = rows or self.known_data("train_dataset.path").get("rows")

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or the default where it is missing, null, or an interpolation that leads nowhere."""
        value = self.flat.get(key)
        return default if value is None or "${" in str(value) else value

    def holds(self, condition: str) -> bool:
        """Whether a key, or one of those that begin so, is set (`actor.use_lora`) or has a value (`key=value`)."""
        key, equals, value = condition.partition("=")
        return str(self.get(key)) == value if equals else any(self.get(one) for one in self.flat if one.startswith(key))

    def known_data(self, key: str) -> dict[str, Any]:
        """What is known of the data set that a key names."""
        return dict(TABLE["data_sets"].get(str(self.get(key)), {}))

    def steps(self, epochs: float) -> int:
        """Training steps in so many epochs; as in AReaL without a last batch that is not full."""
        if self.rows is None:
            raise ValueError("how many rows the data set has is not known here: areal convert --rows N")
        steps = float(epochs) * (self.rows // self.get("train_dataset.batch_size"))
        if not 1 <= steps < math.inf:
            raise ValueError(f"{epochs} epochs of {self.rows} rows are no training step")
        return int(steps)


def read(path: Path) -> dict[str, Any]:
    """The file as it is.

    Raises:
        UsageError: it cannot be read, or is no config of AReaL's RL.
    """
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path)).values
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    missing = [name for name in SECTIONS if not isinstance(tree, dict) or not isinstance(tree.get(name), dict)]
    if missing:
        raise UsageError(f"{path} is no config of AReaL's GRPO or PPO: it has no section {', '.join(missing)}")
    size = tree["train_dataset"].get("batch_size")
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"{path} has no number in train_dataset.batch_size: write it out, steps are counted by it")
    return dict(tree)


def matching(rules: dict[str, Any], key: str) -> list[Any]:
    """What the rules whose patterns have a key say."""
    return [said for names, said in rules.items() if any(fnmatchcase(key, one) for one in names.split(", "))]


def _laid(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """A section on AReaL's defaults, null being none; a section that the file does not have stays away."""
    laid = {key: value for key, value in defaults.items() if not isinstance(value, dict)}
    for key, value in tree.items():
        if isinstance(value, dict):
            laid[key] = _laid(value, defaults[key] if isinstance(defaults.get(key), dict) else {})
        elif value is not None or key not in laid:
            laid[key] = value
    return laid


def _resolved(value: Any, tree: dict[str, Any], seen: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {str(key): _resolved(one, tree, seen) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    if match := _REFERENCE.fullmatch(value):
        return _at(tree, match[1], seen)
    return _REFERENCE.sub(lambda match: str(_at(tree, match[1], seen)), value)


def _at(tree: Any, key: str, seen: tuple[str, ...]) -> Any:
    """What an interpolation names; itself, where that is nothing, or leads back to it."""
    own = f"${{{key}}}"
    value = reduce(lambda at, part: at.get(part, own) if isinstance(at, dict) else own, key.split("."), tree)
    return own if key in seen else _resolved(value, tree, (*seen, key))


def _flatten(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        below = isinstance(value, dict) and value
        flat |= _flatten(value, f"{prefix}{key}.") if below else {f"{prefix}{key}": value}
    return flat
