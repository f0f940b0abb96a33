"""Which architectures a vLLM has registered, read from its source: importing vLLM needs a GPU's libraries."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

from areal_core.servers import find_architecture

if TYPE_CHECKING:
    from areal_core.plugins import Finding

_REGISTRY = Path("model_executor", "models", "registry.py")
_NATIVE = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
_BY_TRANSFORMERS = "_TRANSFORMERS_SUPPORTED_MODELS"


def registered(package: Path) -> dict[str, str]:
    """Return for each architecture that generates `yes`, or `by transformers` where vLLM runs transformers' code.

    Args:
        package: the folder `vllm` of an installation.

    Raises:
        OSError: it has no registry.
        ValueError: the registry is none that is known here.
    """
    tree = ast.parse((package / _REGISTRY).read_text(encoding="utf-8"))
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Dict)
    }
    found: dict[str, str] = {}
    for name in (_BY_TRANSFORMERS, *_NATIVE):
        if name not in tables:
            raise ValueError(f"{package / _REGISTRY} has no table {name}")
        keys = [key.value for key in tables[name].keys if isinstance(key, ast.Constant)]
        found |= dict.fromkeys(map(str, keys), "yes" if name in _NATIVE else "by transformers")
    return found


def check_architecture(folder: Path) -> Finding:
    """Report whether the vLLM that is installed here has registered a model's architecture."""
    return find_architecture(folder, "vllm", "vLLM", registered)
