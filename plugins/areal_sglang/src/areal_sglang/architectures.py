"""Architectures of an installed SGLang, read from its source: importing SGLang needs GPU libraries."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.servers import find_architecture

if TYPE_CHECKING:
    from areal_core.plugins import Finding

_MODELS = Path("srt", "models")
_NAME = "EntryClass"


def registered(package: Path) -> dict[str, str]:
    """Return the architectures in the `EntryClass` of SGLang's model modules, each with the value `yes`.

    Args:
        package: the folder `sglang` of an installation.

    Raises:
        ValueError: no module has an `EntryClass`.
    """
    names: set[str] = set()
    for path in sorted((package / _MODELS).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == _NAME for target in node.targets):
                names |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    if not names:
        raise ValueError(f"no module in {package / _MODELS} has an {_NAME}")
    return dict.fromkeys(names, "yes")


def check_architecture(folder: Path) -> Finding:
    """Report whether the installed SGLang supports a model's architecture."""
    return find_architecture(folder, "sglang", "SGLang", registered)
