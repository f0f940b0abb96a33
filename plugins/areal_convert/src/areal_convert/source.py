"""Read a config of AReaL's: resolve its interpolations and flatten it, so that no key is overlooked."""

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
    """AReaL's config by dotted key (a list is one value), and the outcome of each key.

    Attributes:
        flat: values by dotted key.
        carried: areal's key by AReaL's.
        lost: reason by key that was not carried over.
        unused: reason by key that has no effect.
        defaults: keys that the file leaves to AReaL's defaults.
        rows: number of rows of the training data; None if unknown.
    """

    def __init__(self, tree: dict[str, Any], rows: int | None = None) -> None:
        whole = _merged(tree, TABLE["defaults"])
        self.flat = _flatten(_resolved(whole, whole, ()), "")
        written = _flatten(_resolved(tree, whole, ()), "")
        self.defaults = {key for key, value in self.flat.items() if value is not None and written.get(key) is None}
        self.carried: dict[str, str] = {}
        self.lost: dict[str, str] = {}
        defaults_of_areal = _resolved(TABLE["alike"], whole, ())
        same = {key: "areal does so" for key, value in self.flat.items() if value in matching(defaults_of_areal, key)}
        self.unused = same | {key: "it is not set" for key, value in self.flat.items() if value is None}
        self.rows: int | None = rows or self.known_data("train_dataset.path").get("rows")

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or the default if it is missing, null, or an unresolved interpolation."""
        value = self.flat.get(key)
        return default if value is None or "${" in str(value) else value

    def holds(self, condition: str) -> bool:
        """Return whether a key, or a key with this prefix, is set (`actor.use_lora`) or has a value (`key=value`)."""
        key, equals, value = condition.partition("=")
        return (
            str(self.get(key)) == value if equals else any(self.get(name) for name in self.flat if name.startswith(key))
        )

    def known_data(self, key: str) -> dict[str, Any]:
        """Return the table's entry for the data set that a key names, or an empty one."""
        return dict(TABLE["data_sets"].get(str(self.get(key)), {}))

    def steps(self, epochs: float) -> int:
        """Return the training steps of these epochs. As in AReaL, an incomplete last batch is dropped.

        Raises:
            ValueError: the number of rows is unknown, or there would be no step.
        """
        if self.rows is None:
            raise ValueError("the number of rows of the data set is not known: add --rows N")
        steps = float(epochs) * (self.rows // self.get("train_dataset.batch_size"))
        if not 1 <= steps < math.inf:
            raise ValueError(f"{epochs} epochs of {self.rows} rows make no training step")
        return int(steps)


def read(path: Path) -> dict[str, Any]:
    """Return the contents of a config file.

    Raises:
        UsageError: it cannot be read, or is not a config of AReaL's GRPO or PPO.
    """
    try:
        tree = parse_yaml(path.read_text(encoding="utf-8"), str(path)).values
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    missing = [name for name in SECTIONS if not isinstance(tree, dict) or not isinstance(tree.get(name), dict)]
    if missing:
        raise UsageError(f"{path} is not a config of AReaL's GRPO or PPO: it has no section {', '.join(missing)}")
    size = tree["train_dataset"].get("batch_size")
    if not isinstance(size, int) or size < 1:
        raise UsageError(f"{path} has no number in train_dataset.batch_size: write it there, to compute the steps")
    return dict(tree)


def matching(rules: dict[str, Any], key: str) -> list[Any]:
    """Return the values of the rules whose patterns match a key."""
    return [rule for names, rule in rules.items() if any(fnmatchcase(key, pattern) for pattern in names.split(", "))]


def _merged(tree: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """Return a section merged over AReaL's defaults; null keeps a default, and missing sections stay missing."""
    merged = {key: value for key, value in defaults.items() if not isinstance(value, dict)}
    for key, value in tree.items():
        if isinstance(value, dict):
            merged[key] = _merged(value, defaults[key] if isinstance(defaults.get(key), dict) else {})
        elif value is not None or key not in merged:
            merged[key] = value
    return merged


def _resolved(value: Any, tree: dict[str, Any], seen: tuple[str, ...]) -> Any:
    if isinstance(value, dict):
        return {str(key): _resolved(item, tree, seen) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    if match := _REFERENCE.fullmatch(value):
        return _at(tree, match[1], seen)
    return _REFERENCE.sub(lambda match: str(_at(tree, match[1], seen)), value)


def _at(tree: Any, key: str, seen: tuple[str, ...]) -> Any:
    """Return the value that an interpolation names, or the interpolation if there is none or it refers to itself."""
    reference = f"${{{key}}}"
    value = reduce(
        lambda at, part: at.get(part, reference) if isinstance(at, dict) else reference, key.split("."), tree
    )
    return reference if key in seen else _resolved(value, tree, (*seen, key))


def _flatten(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        has_keys = isinstance(value, dict) and value
        flat |= _flatten(value, f"{prefix}{key}.") if has_keys else {f"{prefix}{key}": value}
    return flat
