"""A plugin to begin with: `examples/plugin` renamed, with nothing in it but the kinds that are asked for.

Python files are cut between definitions and others between lines: a part that names a component of another kind is left
out. `key: value  # or other` becomes `key: other` instead. Imports that nothing uses any more go too.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

KINDS: Final = {
    "reward": "brevity",
    "dataset": "doublings",
    "workflow": "self_check",
    "environment": "second_chances",
    "agent": "solver",
    "tool": "product",
    "sandbox": "timed_process",
    "algorithm": "better",
    "reward_shaping": "ranked",
    "group_filter": "not_solved",
    "batch_transform": "surprise_penalty",
    "advantage": "better_or_worse",
    "policy_loss": "capped_reinforce",
    "correction": "near_only",
    "regularizer": "stay_close",
    "auxiliary_loss": "reward_regression",
    "loss_aggregation": "square_root_length",
    "example_tokenizer": "completion_only",
    "model": "local_copy",
    "train_engine": "token_counting",
    "inference_engine": "toy_adapter",
    "weight_transport": "timed_broadcast",
    "launcher": "verbose_launcher",
    "tracker": "metric_lines",
    "preset": "small_run",
    "command": "count_steps",
    "health_check": "c_compiler",
}
"""Each kind that can be asked for, and the component of the template that shows it."""
PARTS: Final = {"algorithm": {"advantage", "policy_loss"}}
"""Kinds that bring others with them."""
FILES_OF_KINDS: Final = {
    "inference_engines.py": "inference_engine",
    "sandboxes.py": "sandbox",
    "small_run.yaml": "preset",
    "test_agents.py": "agent",
    "test_toy_server.py": "inference_engine",
    "test_weight_transports.py": "weight_transport",
    "toy_server.py": "inference_engine",
}
"""Files that belong to one kind as a whole: not every part of them names its component."""
EVENT_HOOK: Final = "areal_run_finished"
"""No plugin begins with it: it supplies nothing that a config names."""
LONGEST: Final = 40
"""Characters of a name: lines of code with it stay short."""
FILES: Final = ("*.*", "LICENSE", "src/*/*.*", "tests/*.py", ".github/workflows/*.yml")


def write_plugin(asked: str, kinds: Collection[str]) -> str:
    """Write the folder `areal-NAME` here, and return a message that lists its files and the next commands.

    Raises:
        UsageError: the name cannot be one of a new plugin, or the folder is there or cannot be made.
    """
    from areal_core.errors import UsageError

    name = _checked(asked)
    folder = Path(f"areal-{name.replace('_', '-')}")
    files = dict(_files(name, {*kinds, *(part for kind in kinds for part in PARTS.get(kind, ()))}))
    try:
        folder.mkdir()
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise UsageError(f"{folder} exists already", hints=("choose another name, or remove it",)) from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}") from None
    written = "\n".join(f"  {folder}/{path}" for path in files)
    commands = (f"cd {folder} && pip install -e '.[run,test]'", "python -m pytest", "areal run run.yaml")
    return "\n".join(["wrote", written, "next:", *(f"  {command}" for command in commands)])


def _checked(asked: str) -> str:
    """The name as it is compared, without the `areal-` of its distribution."""
    from areal_core.errors import UsageError
    from areal_core.plugins.catalog import CORE, FIRST_PARTY, TESTING, Catalog
    from areal_core.plugins.records import NAME, normalize

    name = normalize(asked).removeprefix("areal_")
    if not NAME.fullmatch(name) or len(name) > LONGEST or name.endswith("_"):
        raise UsageError(f"{asked!r} is no name of a plugin", hints=(f"[a-z][a-z0-9_]*, up to {LONGEST} characters",))
    if name in (CORE, TESTING, *FIRST_PARTY):
        raise UsageError(f"the plugin {name} is areal's own", hints=("choose another name",))
    if name in Catalog.scan().names():
        raise UsageError(f"a plugin named {name} is installed", hints=(f"see what it has: areal plugins {name}",))
    return name


def _files(name: str, kinds: Collection[str]) -> Iterator[tuple[str, str]]:
    """The files of the plugin: their paths in its folder, and their texts."""
    template = Path(__file__).parent / "plugin_template"  # in a wheel
    if not template.is_dir():
        template = Path(__file__).parents[2] / "examples" / "plugin"
    others = [component for kind, component in KINDS.items() if kind not in kinds] + [EVENT_HOOK]
    classes = ["".join(map(str.capitalize, other.split("_"))) for other in others]
    unwanted = re.compile(rf"\b({'|'.join(others)}|(Test)?({'|'.join(classes)})(Settings)?)\b")

    def renamed(text: str) -> str:
        own = {"areal-": name.replace("_", "-")}
        return re.sub(r"\b(areal[-_])?example\b", lambda found: f"{found[1] or ''}{own.get(found[1], name)}", text)

    for path in (path for pattern in FILES for path in sorted(template.glob(pattern)) if path.is_file()):
        if path.name in FILES_OF_KINDS and FILES_OF_KINDS[path.name] not in kinds:
            continue
        text = path.read_text(encoding="utf-8")
        kept = _module(text, unwanted) if path.suffix == ".py" else _lines(text, unwanted)
        if kept or not text:
            yield renamed(path.relative_to(template).as_posix()), renamed(kept)


def _lines(text: str, unwanted: re.Pattern[str]) -> str:
    kept = []
    for line in text.splitlines(keepends=True):
        key, colon, values = line.rstrip("\n").partition(": ")
        wanted = [value for value in values.split("  # or ") if not unwanted.search(value)]
        if not unwanted.search(line):
            kept.append(line)
        elif "  # or " in line and wanted:
            kept.append(f"{key}{colon}{wanted[0]}\n")
    return "".join(kept)


def _module(text: str, unwanted: re.Pattern[str]) -> str:
    """The file without the definitions and imports of other kinds; nothing, where it has no others."""
    head, *definitions = text.split("\n\n\n")
    kept = [each for each in definitions if not unwanted.search(each)]
    head = _used(_lines(head, unwanted), "\n".join(kept))
    if definitions and not kept and "__all__" not in head:
        return ""
    return "\n\n\n".join([head, *kept]).rstrip("\n") + "\n"


def _used(head: str, body: str) -> str:
    """Docstring, imports and `__all__`, without imports of names that neither the body uses nor `__all__` lists."""
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)} | {"annotations"}
    head = re.sub(r"__all__ = \[\n\]\n?", "", head)
    used.update(re.findall(r'^    "(\w+)",$', head, re.MULTILINE))
    kept: list[str] = []
    for line in reversed(head.splitlines()):
        found = re.fullmatch(r"(\s*(?:from \S+ )?import |    )([\w, ]+?)(,?)", line)
        if found:
            names = ", ".join(name for name in found[2].split(", ") if name in used)
            kept += [found[1] + names + found[3]] if names else []
        elif line != "if TYPE_CHECKING:":
            kept.append(line)
        elif kept and re.match(r"    \w", kept[-1]):
            used.add("TYPE_CHECKING")
            kept.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(reversed(kept))).rstrip("\n")
