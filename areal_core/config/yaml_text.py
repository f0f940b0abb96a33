"""Read and write YAML 1.2: `3e-4` is a number, `off` is text, and every key has its line.

PyYAML implements YAML 1.1. This module uses PyYAML's parser, but resolves plain scalars by the core schema of YAML 1.2.
A duplicate key is an error, and so is a tag that creates a Python object. The parser refuses more than 10,000 values,
deep nesting and very long numbers, because no config needs them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import yaml

from areal_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from areal_core.config.problems import Path

_TAG: Final = "tag:yaml.org,2002:"

_UNWRITABLE: Final = re.compile("[\0\ud800-\udfff]")

_LINE_BREAKS: Final = re.compile("[\x85\u2028\u2029]")

_FLOAT: Final = r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"

_PLAIN_SCALARS: Final[dict[str, tuple[str, list[str], Callable[[str], Any]]]] = {
    "null": (r"null|Null|NULL|~|", ["n", "N", "~", ""], lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    "int": (
        r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
        list("-+0123456789"),
        lambda text: int(text, 0 if text[:2] in {"0o", "0x"} else 10),
    ),
    "float": (_FLOAT, list("-+.0123456789"), lambda text: float(re.sub(r"\.(?=[a-zA-Z])", "", text))),
}
"""Plain scalars that are not text. For each type: a pattern, the possible first characters, and a parser."""

MOST_VALUES: Final = 10_000
DEEPEST: Final = 40
LONGEST_NUMBER: Final = 100


class _Loader(yaml.SafeLoader):
    """PyYAML's parser with the plain scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  PyYAML's own form


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.1 or 1.2 would read as another type. Never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _write_text(dumper: _Dumper, text: str) -> yaml.Node:
    """Return the node of a text. Characters that PyYAML takes for line breaks are escaped in double quotes."""
    style = '"' if _LINE_BREAKS.search(text) else None
    return dumper.represent_scalar(f"{_TAG}str", text, style=style)


_Dumper.add_representer(str, _write_text)
for _name, (_pattern, _first, _) in _PLAIN_SCALARS.items():
    _anchored = re.compile(rf"(?:{_pattern})\Z")
    _Loader.add_implicit_resolver(_TAG + _name, _anchored, _first)
    _Dumper.add_implicit_resolver(_TAG + _name, _anchored, _first)


@dataclass
class Document:
    """The values of a YAML text, and the line of each key or item.

    Attributes:
        values: plain Python objects.
        lines: number of the line, from 1, by path, such as `("rewards", 0, "weight")`.
    """

    values: Any
    lines: dict[Path, int] = field(default_factory=dict)


def parse_yaml(text: str, name: str) -> Document:
    r"""Parse one YAML 1.2 document.

    Args:
        text: the document.
        name: its name in errors, such as the path of the file.

    Returns:
        A document: `values` has plain Python objects, `lines` has the line of each key by its path, such as
        `("rewards", 0, "weight")`.

    Raises:
        ConfigError: the text is not valid YAML, has a key twice, or is larger or deeper than any config.

    Example:
        >>> from areal_core.config import parse_yaml
        >>> from areal_core.errors import ConfigError
        >>> document = parse_yaml("steps: 20\ntrain_engine: {learning_rate: 3e-4}\n", "run.yaml")
        >>> document.values
        {'steps': 20, 'train_engine': {'learning_rate': 0.0003}}
        >>> document.lines["train_engine", "learning_rate"]
        2
        >>> try:
        ...     parse_yaml("steps: 20\nsteps: 30\n", "run.yaml")
        ... except ConfigError as error:
        ...     print(error)
        run.yaml:2: the key 'steps' occurs twice
    """
    try:
        node = yaml.compose(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # PyYAML does not wrap the latter two
        mark = getattr(error, "problem_mark", None)
        place = f"{name}:{mark.line + 1}" if mark else name
        reason = getattr(error, "problem", None) or str(error).partition("\n")[0]
        reason = f"more than {DEEPEST} levels are nested" if isinstance(error, RecursionError) else reason
        raise ConfigError(f"{place}: not valid YAML: {reason}") from error
    document = Document(None)
    if node is not None:
        document.values = _construct(node, (), document.lines, name)
    return document


def set_value(text: str, key: str, value: str) -> str:
    """Return a document with one key of its mapping set to a value. The rest of the text stays as it is.

    Args:
        text: the document.
        key: a key of its outermost mapping. The document may lack it.
        value: YAML in one line.
    """
    node = yaml.compose(text, _Loader)
    pairs = node.value if isinstance(node, yaml.MappingNode) else ()
    for name, former in pairs:
        if name.value == key:
            is_block = isinstance(former, yaml.SequenceNode) and not former.flow_style
            # The end mark of a block sequence lies behind the blank lines and comments that follow the sequence.
            end = (former.value[-1] if is_block else former).end_mark.index
            return f"{text[: name.start_mark.index]}{key}: {value}{text[end:]}"
    return f"{key}: {value}\n{text}"


def parse_value(text: str) -> Any:
    """Parse the value of an override: a scalar, or a list or mapping in flow style. Raises `ValueError`."""
    if not text.strip():
        raise ValueError("is empty; write null to clear it, '' for an empty text")
    try:
        node = yaml.compose(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError("is not a YAML scalar or flow list; quote a text that has special characters") from error
    if isinstance(node, yaml.CollectionNode) and not node.flow_style:
        raise ValueError("is neither a scalar nor a flow list; quote a text that has special characters")
    if node is None:  # the text is only a comment
        return None
    try:
        return _construct(node, (), {}, "the value")
    except ConfigError as error:
        raise ValueError(error.message) from error


def dump(values: Any, width: int = 110) -> str:
    """Return values as YAML, from which `parse_yaml` reads the same values. Keys keep their order."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=width, default_flow_style=False)


def _construct(node: Any, path: Path, lines: dict[Path, int], name: str) -> Any:
    """Return the plain values of a parsed node, and add the line of each to `lines`."""
    line = node.start_mark.line + 1
    if len(path) > DEEPEST:
        raise ConfigError(f"{name}:{line}: more than {DEEPEST} levels are nested here, or an alias contains itself")
    if len(lines) > MOST_VALUES:
        raise ConfigError(f"{name}:{line}: a config has at most {MOST_VALUES:,} values; data lies in files of its own")
    lines.setdefault(path, line)
    if isinstance(node, yaml.ScalarNode):
        return _scalar(node, name)
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, index), lines, name) for index, item in enumerate(node.value)]
    values: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, key_line = getattr(key_node, "value", None), key_node.start_mark.line + 1
        if not isinstance(key, str):
            raise ConfigError(f"{name}:{key_line}: a key must be a plain word")
        if key in values:
            raise ConfigError(f"{name}:{key_line}: the key '{key}' occurs twice")
        _refuse_unwritable(key, f"{name}:{key_line}")
        lines[*path, key] = key_line
        values[key] = _construct(value_node, (*path, key), lines, name)
    return values


def _scalar(node: yaml.ScalarNode, name: str) -> Any:
    kind, text, place = node.tag.removeprefix(_TAG), node.value, f"{name}:{node.start_mark.line + 1}"
    if kind == "str":
        _refuse_unwritable(text, place)
        return text
    if kind not in _PLAIN_SCALARS:
        raise ConfigError(f"{place}: the tag {node.tag} is not allowed in a config")
    pattern, _, parse = _PLAIN_SCALARS[kind]
    if len(text) > LONGEST_NUMBER or not re.fullmatch(pattern, text):
        raise ConfigError(f"{place}: {text[:40]!r} is not a {kind} of at most {LONGEST_NUMBER} characters")
    return parse(text)


def _refuse_unwritable(text: str, place: str) -> None:
    """Refuse a NUL, which no path can contain, and half of a surrogate pair, which no file can contain."""
    if _UNWRITABLE.search(text):
        raise ConfigError(f"{place}: a text holds a character that cannot be written: {text[:40]!a}")
