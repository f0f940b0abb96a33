"""Which architectures an SGLang has registered, read from its source: importing SGLang takes a GPU's libraries."""

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
    """Return `yes` for each architecture for which a module of SGLang's models has an `EntryClass`.

    Args:
        package: the folder `sglang` of an installation.

    Raises:
        ValueError: no module has one.
    """
    found: set[str] = set()
    for path in sorted((package / _MODELS).glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and any(ast.unparse(target) == _NAME for target in node.targets):
                found |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
    if not found:
        raise ValueError(f"no module in {package / _MODELS} has an {_NAME}")
    return dict.fromkeys(found, "yes")


def check_architecture(folder: Path) -> Finding:
    """Report whether the SGLang that is installed here has registered a model's architecture."""
    return find_architecture(folder, "sglang", "SGLang", registered)
